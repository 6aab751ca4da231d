// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A permutation of 0 ... count - 1 that depends on `count` and `seed` alone: the same on
/// every platform and standard library, so that a run can be repeated elsewhere.
[[nodiscard]] inline std::vector<std::size_t> shuffled_order(std::size_t count,
                                                             std::uint64_t seed) {
  std::uint64_t state = seed;
  const auto next = [&state] {  // splitmix64
    std::uint64_t z = state += 0x9E3779B97F4A7C15ULL;
    z = (z ^ z >> 30U) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ z >> 27U) * 0x94D049BB133111EBULL;
    return z ^ z >> 31U;
  };
  const auto below = [&next](std::uint64_t bound) {  // unbiased: draws from the short tail repeat
    const std::uint64_t reject = (0 - bound) % bound;
    std::uint64_t draw = next();
    while (draw < reject) draw = next();
    return draw % bound;
  };
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = count; i > 1; --i) std::swap(order[i - 1], order[below(i)]);
  return order;
}

}  // namespace block_streamer::inline v1
