// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/stored_tensor.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/config.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Consecutive rows of a matrix.
struct RowRange {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

/// What a slice of a model's head has at most, unless another number is asked for: 64 MiB in a half
/// type. Large enough that a visit's fixed cost does not show, small beside a block.
inline constexpr std::uint64_t default_slice_elements = std::uint64_t{1} << 25;

/// @brief Cuts a matrix into slices of rows of about equal size: as few as keep each within
/// `most_elements`. Every slice but the last has the same number of rows, a multiple of 128 (of
/// less where most_elements is less), so that each begins at a multiple of 256 bytes in any type of
/// two bytes or more: kernels then find a slice aligned alike wherever it lies.
/// @pre row_count, column_count and most_elements are positive.
[[nodiscard]] inline std::vector<RowRange> slice_rows(std::uint64_t row_count,
                                                      std::uint64_t column_count,
                                                      std::uint64_t most_elements) {
  expects(row_count > 0 && column_count > 0 && most_elements > 0,
          "a matrix that is sliced has elements, and so have its slices");
  const std::uint64_t aligned =
      tensor_alignment / std::gcd(std::uint64_t{tensor_alignment}, column_count * 2);
  const std::uint64_t most = std::max(most_elements / column_count, aligned);
  const std::uint64_t unit =
      most < 128 ? aligned : 128;  // `aligned` is a power of two, 128 at most
  const std::uint64_t whole = round_down(most, unit);
  const std::uint64_t slices = (row_count + whole - 1) / whole;
  const std::uint64_t even = round_up((row_count + slices - 1) / slices, unit);
  std::vector<RowRange> ranges;
  for (std::uint64_t begin = 0; begin < row_count; begin += even) {
    ranges.push_back({begin, std::min(even, row_count - begin)});
  }
  return ranges;
}

/// @brief "weight[0:128]": what the block of a slice calls its only tensor.
[[nodiscard]] inline std::string slice_name(std::string_view tensor, const RowRange& rows) {
  return std::string{tensor} + "[" + std::to_string(rows.begin) + ":" +
         std::to_string(rows.begin + rows.count) + "]";
}

/// @brief A block map of slices of one stored matrix, a block each, with one tensor that is called
/// slice_name(name, rows). Nothing is converted, and no slice overlaps another in what is needed of
/// the file. @see make_block_map
/// @throws BindingError, UnsupportedError as Checkpoint::at().
/// @pre the tensor is a matrix that has the rows.
[[nodiscard]] inline BlockMap make_row_slice_map(const Checkpoint& checkpoint,
                                                 std::string_view name,
                                                 std::span<const RowRange> slices,
                                                 std::uint32_t read_granularity = 1) {
  const StoredTensor& matrix = checkpoint.at(name);
  expects(matrix.spec.shape.size() == 2, "what is sliced by rows is a matrix");
  const std::uint64_t row_byte_count =
      matrix.spec.shape[1] * byte_count_of(matrix.spec.dtype);  // fits: the tensor's bytes do
  std::vector<BlockSource> sources;
  for (const RowRange& rows : slices) {
    expects(rows.begin <= matrix.spec.shape[0] && rows.count <= matrix.spec.shape[0] - rows.begin,
            "a slice lies inside the matrix");
    StoredTensor slice = matrix;
    slice.spec.name = slice_name(name, rows);
    slice.spec.shape[0] = rows.count;
    slice.range = {matrix.range.offset + rows.begin * row_byte_count, rows.count * row_byte_count};
    const StoredTensor* const only = &slice;
    sources.push_back(detail::make_block_source(std::span{&only, 1}, 0, read_granularity));
  }
  return {std::move(sources),
          {checkpoint.files().begin(), checkpoint.files().end()},
          std::vector<std::string>(slices.size())};
}

}  // namespace block_streamer::inline v1
