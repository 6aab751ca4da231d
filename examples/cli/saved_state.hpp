// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <string>

namespace block_streamer_cli {

/// @brief Reads a run's saved state: of one that is damaged the message says what can be done.
template <class Read>
auto with_a_way_out(const Read& read) {
  try {
    return read();
  } catch (const block_streamer::FormatError& error) {
    throw block_streamer::Error{
        error.what() + std::string{"; the run cannot go on from it: --overwrite begins a new one"}};
  }
}

}  // namespace block_streamer_cli
