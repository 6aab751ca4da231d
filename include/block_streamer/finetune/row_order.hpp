// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/shuffled_order.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Which rows come next: all of them once an epoch, in an order of its own each time, for
/// ever. The same seed gives the same sequence on every platform.
class RowOrder {
 public:
  /// @pre row_count > 0.
  RowOrder(std::size_t row_count, std::uint64_t seed) : row_count_{row_count}, seed_{seed} {
    expects(row_count > 0, "there is at least one row");
  }
  /// @brief The next `count` rows; they may span epochs.
  [[nodiscard]] std::vector<std::size_t> take(std::size_t count) {
    std::vector<std::size_t> rows;
    while (rows.size() < count) {
      if (next_ == order_.size()) {
        order_ = shuffled_order(row_count_, seed_ + epoch_++);
        next_ = 0;
      }
      rows.push_back(order_[next_++]);
    }
    return rows;
  }
  /// @brief Epochs begun.
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }

 private:
  std::size_t row_count_;
  std::uint64_t seed_;
  std::uint64_t epoch_ = 0;
  std::vector<std::size_t> order_;
  std::size_t next_ = 0;
};

}  // namespace block_streamer::inline v1
