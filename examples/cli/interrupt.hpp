// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace block_streamer_cli {

/// The exit code of a run that Ctrl-C ended.
inline constexpr int interrupted_exit_code = 130;

/// @brief From now on the first Ctrl-C, SIGTERM or SIGHUP (a terminal that closes) is only
/// remembered; a second one exits at once.
void catch_interrupts();
/// @brief True once one of them came.
[[nodiscard]] bool interrupted() noexcept;

}  // namespace block_streamer_cli
