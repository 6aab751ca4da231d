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
#include <vector>

namespace block_streamer::inline v1 {

/// Rows of unequal length side by side, padded at the right, where no token sees the padding; or
/// packed sequences in one row.
struct RowBatch {
  at::Tensor ids;            ///< (B, T) int64 on the CPU; padding is token 0
  at::Tensor trained;        ///< (B, T) bool on the CPU; false in the padding
  std::uint64_t tokens = 0;  ///< real ones
  /// Lengths of independent sequences that make up the one row (B = 1); empty: rows are sequences.
  std::vector<std::int64_t> sequences{};
};

namespace detail {
/// Packed rows become one long row of all their sequences: nothing is padded.
[[nodiscard]] inline TextRow joined(std::span<const TextRow> rows,
                                    std::span<const std::size_t> numbers) {
  TextRow all;
  for (const std::size_t n : numbers) {
    const TextRow& row = rows[n];
    all.tokens.insert(all.tokens.end(), row.tokens.begin(), row.tokens.end());
    all.trained.insert(all.trained.end(), row.trained.begin(), row.trained.end());
    if (row.sequences.empty()) {
      all.sequences.push_back(static_cast<std::uint32_t>(row.tokens.size()));
    } else {
      all.sequences.insert(all.sequences.end(), row.sequences.begin(), row.sequences.end());
    }
  }
  return all;
}
}  // namespace detail

/// @brief Lays the rows with these numbers side by side; T is the longest of them. If one of them
/// is packed, one behind the other: B is 1 and T their sum.
/// @pre at least one row, none empty.
[[nodiscard]] inline RowBatch make_row_batch(std::span<const TextRow> rows,
                                             std::span<const std::size_t> numbers) {
  expects(!numbers.empty(), "a batch has at least one row");
  const auto packed = [&](std::size_t n) { return !rows[n].sequences.empty(); };
  if (std::any_of(numbers.begin(), numbers.end(), packed)) {
    TextRow all = detail::joined(rows, numbers);
    const std::vector<std::int64_t> sequences{all.sequences.begin(), all.sequences.end()};
    all.sequences.clear();
    constexpr std::size_t only[] = {0};
    RowBatch batch = make_row_batch(std::span{&all, 1}, only);
    batch.sequences = sequences;
    return batch;
  }
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
