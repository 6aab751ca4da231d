// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/text_row.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace block_streamer::inline v1 {

/// Rows of unequal length side by side, padded at the right, where no token sees the padding.
struct RowBatch {
  at::Tensor ids;            ///< (B, T) int64 on the CPU; padding is token 0
  at::Tensor trained;        ///< (B, T) bool on the CPU; false in the padding
  std::uint64_t tokens = 0;  ///< real ones
};

/// @brief Lays the rows with these numbers side by side. T is the longest of them.
/// @pre at least one row, none empty.
[[nodiscard]] inline RowBatch make_row_batch(std::span<const TextRow> rows,
                                             std::span<const std::size_t> numbers) {
  expects(!numbers.empty(), "a batch has at least one row");
  std::size_t longest = 0;
  for (const std::size_t n : numbers) longest = std::max(longest, rows[n].tokens.size());
  expects(longest > 0, "a row has at least one token");
  const at::IntArrayRef::value_type shape[] = {static_cast<std::int64_t>(numbers.size()),
                                               static_cast<std::int64_t>(longest)};
  RowBatch batch{at::zeros(shape, at::kLong), at::zeros(shape, at::kBool), 0};
  for (std::size_t b = 0; b < numbers.size(); ++b) {
    const TextRow& row = rows[numbers[b]];
    auto* ids = batch.ids.mutable_data_ptr<std::int64_t>() + b * longest;
    auto* trained = batch.trained.mutable_data_ptr<bool>() + b * longest;
    std::copy(row.tokens.begin(), row.tokens.end(), ids);
    std::transform(row.trained.begin(), row.trained.end(), trained,
                   [](std::uint8_t t) { return t != 0; });
    batch.tokens += row.tokens.size();
  }
  return batch;
}

}  // namespace block_streamer::inline v1
