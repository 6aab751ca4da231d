// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// Tensors, parameters and bytes of one block or of one group of tensors.
struct TensorTotals {
  std::uint64_t tensor_count = 0;
  std::uint64_t parameter_count = 0;
  std::uint64_t byte_count = 0;
  friend bool operator==(const TensorTotals&, const TensorTotals&) = default;

  void add(const StoredTensor& tensor) {
    ++tensor_count;
    parameter_count += element_count(tensor.spec.shape).value_or(0);
    byte_count += tensor.range.byte_count;
  }
  void add(const TensorTotals& other) {
    tensor_count += other.tensor_count;
    parameter_count += other.parameter_count;
    byte_count += other.byte_count;
  }
};

/// What would stream and what would stay, from headers alone.
struct ModelSummary {
  std::string model_type;
  bool tied = false;
  std::vector<TensorTotals> blocks;  ///< in the order of execution
  TensorTotals streamed;             ///< the sum of the blocks
  TensorTotals resident;             ///< embedding, final norm, and the head unless tied
  TensorTotals ignored;              ///< parameters of types that are not carried count as 0
  std::uint64_t largest_block_byte_count = 0;
  std::map<std::string, TensorTotals, std::less<>> by_dtype;  ///< of streamed and resident tensors
  std::uint64_t file_count = 0;
};

/// @brief Adds up a layout that describe_model() made of the same checkpoint.
/// **Cost.** One look-up per tensor; no weight is read.
[[nodiscard]] inline ModelSummary summarize(const ModelLayout& layout,
                                            const Checkpoint& checkpoint) {
  ModelSummary summary;
  summary.model_type = name_of(layout.family);
  summary.tied = layout.tied;
  summary.file_count = checkpoint.files().size();
  const auto count = [&](const std::string& name, TensorTotals& totals) {
    const StoredTensor& tensor = checkpoint.at(name);
    totals.add(tensor);
    summary.by_dtype[std::string{name_of(tensor.spec.dtype)}].add(tensor);
  };
  for (const BlockTensors& block : layout.blocks) {
    TensorTotals& totals = summary.blocks.emplace_back();
    for (const std::string& name : block.names) count(block.prefix + name, totals);
    summary.streamed.add(totals);
    summary.largest_block_byte_count =
        std::max(summary.largest_block_byte_count, totals.byte_count);
  }
  for (const std::string& name : layout.resident) count(name, summary.resident);
  for (const std::string& name : layout.ignored) {
    if (const StoredTensor* tensor = checkpoint.find(name)) summary.ignored.add(*tensor);
  }
  for (const UnsupportedTensor& tensor : checkpoint.unsupported()) {
    summary.ignored.add(TensorTotals{1, 0, tensor.range.byte_count});
  }
  return summary;
}

}  // namespace block_streamer::inline v1
