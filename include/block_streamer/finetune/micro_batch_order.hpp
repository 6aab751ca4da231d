// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <cstdint>

namespace block_streamer::inline v1 {

/// How the passes of a step go through the blocks. No bit depends on it.
enum class MicroBatchOrder : std::uint8_t {
  together,    ///< each block is fetched twice a step, for all; the saved inputs of all are held
  sequential,  ///< one pass after another, each fetches every block; one pass's inputs are held
};

}  // namespace block_streamer::inline v1
