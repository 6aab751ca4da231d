// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/os/file.hpp>
#include <block_streamer/trace/row_reads.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

namespace block_streamer::inline v1 {

/// @brief A matrix of a checkpoint that stays where it lies: single rows are read when they are
/// needed. For tables of which a pass needs few rows, as an embedding.
/// **Threads.** Const functions from any thread. **Cost.** One open file; nothing of the matrix is
/// kept, but what the system's page cache does.
class StoredRows {
 public:
  /// @throws BindingError, UnsupportedError as Checkpoint::at(); StorageError if the file cannot be
  /// opened. @pre the tensor is a matrix.
  StoredRows(const Checkpoint& checkpoint, std::string_view name)
      : stored_{checkpoint.at(name)},
        path_{checkpoint.files()[stored_.file]},
        file_{File::open(path_)} {
    expects(stored_.spec.shape.size() == 2, "what is read by rows is a matrix");
  }

  [[nodiscard]] std::uint64_t row_count() const noexcept { return stored_.spec.shape[0]; }
  [[nodiscard]] std::uint64_t row_byte_count() const noexcept {
    return stored_.spec.shape[1] * byte_count_of(stored_.spec.dtype);
  }
  [[nodiscard]] DType dtype() const noexcept { return stored_.spec.dtype; }

  /// @brief The rows in that order: (rows.size(), C) as stored, on the CPU; a normal tensor.
  /// @param rows  each below row_count().
  /// @throws StorageError naming file, offset, tensor and row if one cannot be read.
  /// **Cost.** One read for each run of rows that follow one another in the file.
  [[nodiscard]] at::Tensor gather(std::span<const std::int64_t> rows) const {
    const c10::InferenceMode normal_mode{false};
    at::Tensor result = at::empty(
        {static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(stored_.spec.shape[1])},
        at::TensorOptions{}.dtype(scalar_type_of(stored_.spec.dtype)));
    std::span<std::byte> out = bytes_of(result);
    for (std::size_t begin = 0; begin < rows.size();) {
      std::size_t end = begin + 1;
      while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
      const std::size_t byte_count = (end - begin) * static_cast<std::size_t>(row_byte_count());
      read(rows[begin], rows[end - 1], out.first(byte_count));
      out = out.subspan(byte_count);
      begin = end;
    }
    return result;
  }

  /// @brief What was read since it was made.
  [[nodiscard]] RowReads reads() const noexcept {
    return {rows_read_, rows_read_ * row_byte_count()};
  }

 private:
  void read(std::int64_t first, std::int64_t last, std::span<std::byte> out) const {
    expects(first >= 0 && static_cast<std::uint64_t>(last) < row_count(),
            "the rows are those of the matrix");
    const std::uint64_t offset =
        stored_.range.offset + static_cast<std::uint64_t>(first) * row_byte_count();
    if (const std::error_code error = file_.read_at(offset, out)) {
      throw StorageError{path_.string() + ", offset " + std::to_string(offset) + ", tensor " +
                             stored_.spec.name + ", row " + std::to_string(first),
                         "cannot read the row", error};
    }
    rows_read_ += static_cast<std::uint64_t>(last - first) + 1;
  }

  StoredTensor stored_;
  std::filesystem::path path_;
  File file_;
  mutable std::atomic<std::uint64_t> rows_read_ = 0;
};

}  // namespace block_streamer::inline v1
