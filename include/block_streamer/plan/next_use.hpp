// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// When each part of a sequence of visits (a pass followed by its hint) is used next.
class NextUse {
 public:
  static constexpr std::uint32_t unused = std::numeric_limits<std::uint32_t>::max();

  NextUse(std::span<const PartId> order, std::span<const PartId> hint) {
    sequence_.reserve(order.size() + hint.size());
    sequence_.insert(sequence_.end(), order.begin(), order.end());
    sequence_.insert(sequence_.end(), hint.begin(), hint.end());
    by_part_.resize(sequence_.size());
    for (std::uint32_t i = 0; i < by_part_.size(); ++i) by_part_[i] = i;
    std::stable_sort(by_part_.begin(), by_part_.end(), [this](std::uint32_t a, std::uint32_t b) {
      return sequence_[a] < sequence_[b];
    });
    next_.assign(sequence_.size(), unused);
    for (std::size_t i = 1; i < by_part_.size(); ++i) {
      if (sequence_[by_part_[i - 1]] == sequence_[by_part_[i]])
        next_[by_part_[i - 1]] = by_part_[i];
    }
  }

  [[nodiscard]] PartId part(std::size_t visit) const noexcept { return sequence_[visit]; }
  /// @brief The next visit after `visit` to the same part, or `unused`.
  [[nodiscard]] std::uint32_t next(std::size_t visit) const noexcept { return next_[visit]; }
  /// @brief The first visit to `part`, or `unused`.
  [[nodiscard]] std::uint32_t first(PartId part) const noexcept {
    const auto at = std::lower_bound(
        by_part_.begin(), by_part_.end(), part,
        [this](std::uint32_t visit, PartId wanted) { return sequence_[visit] < wanted; });
    return at != by_part_.end() && sequence_[*at] == part ? *at : unused;
  }

 private:
  std::vector<PartId> sequence_;
  std::vector<std::uint32_t> by_part_;  ///< visits sorted by part, then by time
  std::vector<std::uint32_t> next_;
};

}  // namespace block_streamer::inline v1
