// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/shuffled_order.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace block_streamer::inline v1 {

/// In which order an epoch walks over the rows.
enum class RowShuffle : std::uint8_t {
  by_seed,  ///< another order each epoch, which depends on the seed alone
  none,     ///< as they stand in the file
};

/// @brief Which rows come next: all of them once an epoch, for ever. The same seed gives the same
/// sequence on every platform. What stands at a position is a function of the position, so going on
/// from there needs nothing but its number.
class RowOrder {
 public:
  /// @pre row_count > 0.
  RowOrder(std::size_t row_count, std::uint64_t seed, RowShuffle shuffle = RowShuffle::by_seed)
      : row_count_{row_count}, seed_{seed}, shuffle_{shuffle} {
    expects(row_count > 0, "there is at least one row");
  }
  /// @brief The next `count` rows; they may span epochs.
  [[nodiscard]] std::vector<std::size_t> take(std::size_t count) {
    std::vector<std::size_t> rows;
    while (rows.size() < count) {
      if (next_ == order_.size()) begin_epoch();
      rows.push_back(order_[next_++]);
    }
    return rows;
  }
  /// @brief Goes on as if `position` rows had been taken since the beginning.
  /// **Cost.** One order of the rows, whatever the position.
  void seek(std::uint64_t position) {
    epoch_ = position / row_count_;
    order_.clear();
    next_ = 0;
    if (position % row_count_ == 0) return;
    begin_epoch();
    next_ = static_cast<std::size_t>(position % row_count_);
  }
  /// @brief Epochs begun.
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }

 private:
  void begin_epoch() {
    if (shuffle_ == RowShuffle::by_seed) {
      order_ = shuffled_order(row_count_, seed_ + epoch_);
    } else {
      order_.resize(row_count_);
      std::iota(order_.begin(), order_.end(), std::size_t{0});
    }
    ++epoch_;
    next_ = 0;
  }

  std::size_t row_count_;
  std::uint64_t seed_;
  RowShuffle shuffle_;
  std::uint64_t epoch_ = 0;
  std::vector<std::size_t> order_;
  std::size_t next_ = 0;
};

/// @brief The seed of what a step draws (dropout): a function of the run's seed and the step's
/// number, so a run that goes on from a step draws as if it had never stopped.
/// @param step  1-based.
[[nodiscard]] inline std::uint64_t step_seed(std::uint64_t seed, std::uint64_t step) noexcept {
  std::uint64_t z = seed ^ step * 0x9E3779B97F4A7C15ULL;
  z = (z ^ z >> 30U) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ z >> 27U) * 0x94D049BB133111EBULL;
  return z ^ z >> 31U;
}

}  // namespace block_streamer::inline v1
