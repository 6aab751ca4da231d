// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

/// The tensors of one file of a checkpoint that is to be written.
struct ShardOfTensors {
  std::string file_name;                     ///< as Hugging Face's libraries name it
  std::vector<const StoredTensor*> tensors;  ///< in the order of their bytes in the source
  std::uint64_t byte_count = 0;
};

/// @brief Splits a checkpoint's tensors into files of at most so many bytes (more for a tensor that
/// is larger alone), in the order in which they lie in the source.
/// **Lifetime.** Points into the checkpoint.
[[nodiscard]] inline std::vector<ShardOfTensors> split_into_shards(const Checkpoint& checkpoint,
                                                                   std::uint64_t shard_byte_count) {
  expects(shard_byte_count > 0, "a shard holds something");
  std::vector<const StoredTensor*> all;
  for (const StoredTensor& tensor : checkpoint.tensors()) all.push_back(&tensor);
  std::sort(all.begin(), all.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return std::tuple{a->file, a->range.offset, std::string_view{a->spec.name}} <
           std::tuple{b->file, b->range.offset, std::string_view{b->spec.name}};
  });
  std::vector<ShardOfTensors> shards(1);
  for (const StoredTensor* tensor : all) {
    if (!shards.back().tensors.empty() &&
        tensor->range.byte_count >
            shard_byte_count - std::min(shard_byte_count, shards.back().byte_count))
      shards.emplace_back();
    shards.back().tensors.push_back(tensor);
    shards.back().byte_count += tensor->range.byte_count;
  }
  const auto five = [](std::size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shards[i].file_name =
        shards.size() == 1 ? "model.safetensors"
                           : "model-" + five(i + 1) + "-of-" + five(shards.size()) + ".safetensors";
  }
  return shards;
}

/// @brief The text of model.safetensors.index.json.
[[nodiscard]] inline std::string shard_index_text(const std::vector<ShardOfTensors>& shards) {
  nlohmann::json map = nlohmann::json::object();  // sorted by name
  std::uint64_t total = 0;
  for (const ShardOfTensors& shard : shards) {
    total += shard.byte_count;
    for (const StoredTensor* tensor : shard.tensors) map[tensor->spec.name] = shard.file_name;
  }
  return nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n";
}

}  // namespace block_streamer::inline v1
