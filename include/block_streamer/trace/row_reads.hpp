// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace block_streamer::inline v1 {

/// What was read of a matrix of which only the rows at hand are.
struct RowReads {
  std::uint64_t rows = 0;
  std::uint64_t bytes = 0;
};

}  // namespace block_streamer::inline v1
