// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// Chooses blocks within a budget. Sizes are in bytes.
class SpreadChoice {
 public:
  SpreadChoice(std::span<const std::uint64_t> sizes, std::uint64_t budget)
      : sizes_{sizes}, left_{budget}, chosen_(sizes.size(), 0) {}

  std::vector<std::uint8_t> run() {
    fill(static_cast<double>(left_));
    // Once more for what that took: a budget that no block fills up would leave the last one added
    // somewhere in between.
    const std::uint64_t budget = left_ + taken_;
    std::vector<std::uint8_t> first = chosen_;
    const std::uint64_t took = taken_;
    std::fill(chosen_.begin(), chosen_.end(), std::uint8_t{0});
    left_ = budget;
    taken_ = 0;
    fill(static_cast<double>(took));
    if (taken_ < took) chosen_.swap(first);
    return std::move(chosen_);
  }

 private:
  void fill(double target) {
    evenly(target);
    while (add_largest() || exchange()) {
    }
  }
  /// Walks the list and takes a block whenever the bytes taken fall behind its share.
  void evenly(double target) {
    const double total =
        static_cast<double>(std::accumulate(sizes_.begin(), sizes_.end(), std::uint64_t{0}));
    if (total == 0) return;
    const double share = std::min(1.0, target / total);
    double behind = 0;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      const auto size = static_cast<double>(sizes_[i]);
      behind += size * share;
      if (behind < size / 2 || sizes_[i] > left_) continue;
      take(i);
      behind -= size;
    }
  }
  /// What still fits, the largest first; among equals the one that is farthest from those taken.
  bool add_largest() {
    std::optional<std::size_t> best;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      if (chosen_[i] != 0 || sizes_[i] > left_) continue;
      if (!best || sizes_[i] > sizes_[*best] ||
          (sizes_[i] == sizes_[*best] && distance(i) > distance(*best))) {
        best = i;
      }
    }
    if (best) take(*best);
    return best.has_value();
  }
  /// Gives a block up for a larger one that fits, where that fills most.
  bool exchange() {
    std::size_t out = 0, in = 0;
    std::uint64_t gain = 0;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      for (std::size_t j = 0; chosen_[i] != 0 && j < sizes_.size(); ++j) {
        if (chosen_[j] != 0 || sizes_[j] <= sizes_[i]) continue;
        const std::uint64_t more = sizes_[j] - sizes_[i];
        if (more > left_ || more <= gain) continue;
        gain = more;
        out = i;
        in = j;
      }
    }
    if (gain == 0) return false;
    chosen_[out] = 0;
    left_ += sizes_[out];
    taken_ -= sizes_[out];
    take(in);
    return true;
  }
  void take(std::size_t i) {
    chosen_[i] = 1;
    left_ -= sizes_[i];
    taken_ += sizes_[i];
  }
  /// To the nearest block taken, around the ends.
  [[nodiscard]] std::size_t distance(std::size_t i) const {
    const std::size_t n = sizes_.size();
    for (std::size_t d = 1; d < n; ++d) {
      if (chosen_[(i + d) % n] != 0 || chosen_[(i + n - d) % n] != 0) return d;
    }
    return n;
  }

  std::span<const std::uint64_t> sizes_;
  std::uint64_t left_;
  std::uint64_t taken_ = 0;
  std::vector<std::uint8_t> chosen_;
};

}  // namespace detail

/// @brief Which blocks to keep within `budget` bytes: nearly as many bytes as fit, spread evenly
/// over the list, so that what has to be fetched lies between what is there.
/// @param sizes  bytes of each block. @returns one flag per block.
/// **Cost.** O(n²) an exchange; of n blocks at most a few exchanges. Filling a budget best is
/// knapsack; tests/plan reports the gap to it.
[[nodiscard]] inline std::vector<std::uint8_t> spread_in_budget(
    std::span<const std::uint64_t> sizes, std::uint64_t budget) {
  return detail::SpreadChoice{sizes, budget}.run();
}

}  // namespace block_streamer::inline v1
