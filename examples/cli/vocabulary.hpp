// SPDX-License-Identifier: Apache-2.0
// Embedding and head of a model, from headers alone.
#pragma once

#include "console.hpp"

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/architecture/model_summary.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/row_slices.hpp>

#include <algorithm>
#include <cstdint>
#include <string>

namespace block_streamer_cli {

/// Embedding and head, and the slices in which a head is streamed.
struct Vocabulary {
  Vocabulary(const block_streamer::ModelLayout& layout,
             const block_streamer::Checkpoint& checkpoint)
      : tied{layout.tied},
        embedding_bytes{checkpoint.at(layout.embedding).range.byte_count},
        head_bytes{checkpoint.at(layout.head).range.byte_count} {
    const auto& shape = checkpoint.at(layout.head).spec.shape;
    parameters = shape[0] * shape[1];
    const auto slices =
        block_streamer::slice_rows(shape[0], shape[1], block_streamer::default_slice_elements);
    slice_count = slices.size();
    slice_bytes = head_bytes / shape[0] * slices.front().count;
    slice_parameters = shape[1] * slices.front().count;
  }

  /// @brief What happens if neither stays.
  [[nodiscard]] std::string words() const {
    return "the final norm; rows of the embedding are read from its file, the head is streamed "
           "in " +
           counted(slice_count, "slice") + " of " + readable_bytes(slice_bytes);
  }

  bool tied;
  std::uint64_t embedding_bytes;  ///< as stored
  std::uint64_t head_bytes;       ///< as stored
  std::uint64_t parameters = 0;   ///< of either
  std::uint64_t slice_count = 0;
  std::uint64_t slice_bytes = 0;  ///< of the largest slice, as stored
  std::uint64_t slice_parameters = 0;
};

[[nodiscard]] inline std::uint64_t largest_parameter_count(
    const block_streamer::ModelSummary& summary) {
  std::uint64_t largest = 0;
  for (const block_streamer::TensorTotals& block : summary.blocks) {
    largest = std::max(largest, block.parameter_count);
  }
  return largest;
}

}  // namespace block_streamer_cli
