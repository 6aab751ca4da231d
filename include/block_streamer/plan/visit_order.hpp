// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>

#include <cstddef>
#include <vector>

namespace block_streamer::inline v1 {

/// The parts that a pass visits, in order.
using VisitOrder = std::vector<PartId>;

/// @brief Blocks first, first + 1, … last - 1, each as one part.
[[nodiscard]] inline VisitOrder ascending(std::size_t first, std::size_t last) {
  VisitOrder order;
  order.reserve(last - first);
  for (std::size_t i = first; i < last; ++i) order.push_back({block_at(i)});
  return order;
}

/// @brief Blocks last - 1, … first + 1, first: the order of a backward that ends at `first`.
[[nodiscard]] inline VisitOrder descending(std::size_t first, std::size_t last) {
  VisitOrder order;
  order.reserve(last - first);
  for (std::size_t i = last; i > first; --i) order.push_back({block_at(i - 1)});
  return order;
}

/// @brief `head` followed by `tail`.
[[nodiscard]] inline VisitOrder joined(VisitOrder head, const VisitOrder& tail) {
  head.insert(head.end(), tail.begin(), tail.end());
  return head;
}

}  // namespace block_streamer::inline v1
