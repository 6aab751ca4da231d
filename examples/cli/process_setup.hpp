// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace block_streamer_cli {

/// @brief Before anything is opened: descriptors 0 to 2 that are closed become /dev/null, so that
/// no file of the run gets one of these numbers and messages with it; a broken pipe and a file-size
/// limit become errors of the write instead of the end of the process.
void set_up_process() noexcept;

}  // namespace block_streamer_cli
