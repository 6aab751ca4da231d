// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/plan/spread.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// Per block the size of its class: a class opens at its largest block, and takes those that leave
/// at most an eighth of such a slot empty.
inline std::vector<std::uint64_t> class_sizes(std::span<const std::uint64_t> blocks) {
  std::vector<std::uint64_t> sorted{blocks.begin(), blocks.end()};
  std::sort(sorted.begin(), sorted.end(), std::greater<>{});
  std::vector<std::uint64_t> classes;
  for (const std::uint64_t size : sorted) {
    if (classes.empty() || size < classes.back() - classes.back() / 8) classes.push_back(size);
  }
  std::vector<std::uint64_t> result;
  for (const std::uint64_t size : blocks) {
    // Descending, so the last class that is not smaller.
    const auto above = std::upper_bound(classes.begin(), classes.end(), size, std::greater<>{});
    result.push_back(*(above - 1));
  }
  return result;
}

}  // namespace detail

/// @brief The slots of an arena: ahead + 1 that take every block, and as many for cached blocks as
/// fit into `device_budget`, each of the size class of a block that it is meant for. Equal blocks
/// give equal slots.
/// @param blocks  slot bytes of each block. @returns sizes in bytes, the largest first; never more
/// slots than blocks.
/// @pre ahead < the number of blocks.
[[nodiscard]] inline std::vector<std::uint64_t> choose_slot_sizes(
    std::span<const std::uint64_t> blocks, std::uint32_t ahead, std::uint64_t device_budget) {
  expects(ahead < blocks.size(), "there are more blocks than blocks on their way");
  const std::uint64_t largest = *std::max_element(blocks.begin(), blocks.end());
  const std::vector<std::uint64_t> classes = detail::class_sizes(blocks);
  const std::vector<std::uint8_t> cached = spread_in_budget(classes, device_budget);
  std::vector<std::uint64_t> slots;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (cached[i] != 0) slots.push_back(classes[i]);
  }
  std::sort(slots.begin(), slots.end(), std::greater<>{});
  // With a slot for every block, the largest ones live in those that take every block.
  const std::size_t most = blocks.size() - ahead - 1;
  if (slots.size() > most) {
    slots.erase(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(slots.size() - most));
  }
  slots.insert(slots.begin(), std::size_t{ahead} + 1, largest);
  return slots;
}

}  // namespace block_streamer::inline v1
