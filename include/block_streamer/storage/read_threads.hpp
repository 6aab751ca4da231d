// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <thread>

namespace block_streamer::inline v1 {

/// @brief How many reads a tier keeps under way when it is told no number: half of the processors,
/// 4 … 8. Fewer than 4 leave a drive without work between two reads. Out of the page cache every
/// thread copies at a rate of its own: 8 reach the rate of a GPU's link where 4 reach two thirds of
/// it (benchmarks/storage_tiers); the other half of the processors is the computation's.
[[nodiscard]] inline std::size_t default_read_threads() noexcept {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency() / 2, 4, 8);
}

}  // namespace block_streamer::inline v1
