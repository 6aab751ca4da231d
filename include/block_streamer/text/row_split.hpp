// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/shuffled_order.hpp>
#include <block_streamer/text/text_row.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Rows to train on and rows to measure on, both in the order in which they stood.
struct RowSplit {
  std::vector<TextRow> training, held_out;
};

/// @brief Holds out a share of the rows: fraction · n of n, rounded, at least one and at most n
/// - 1. Which ones follows from n, the share and the seed alone, on every platform.
/// @pre at least two rows; fraction in (0, 1).
[[nodiscard]] inline RowSplit hold_out_rows(std::vector<TextRow> rows, double fraction,
                                            std::uint64_t seed) {
  expects(rows.size() >= 2 && fraction > 0 && fraction < 1,
          "some rows are held out and some are left");
  const auto count = std::clamp<std::size_t>(
      static_cast<std::size_t>(std::llround(fraction * static_cast<double>(rows.size()))), 1,
      rows.size() - 1);
  std::vector<bool> is_held_out(rows.size());
  const std::vector<std::size_t> order = shuffled_order(rows.size(), seed);
  for (std::size_t i = 0; i < count; ++i) is_held_out[order[i]] = true;
  RowSplit split;
  for (std::size_t i = 0; i < rows.size(); ++i)
    (is_held_out[i] ? split.held_out : split.training).push_back(std::move(rows[i]));
  return split;
}

}  // namespace block_streamer::inline v1
