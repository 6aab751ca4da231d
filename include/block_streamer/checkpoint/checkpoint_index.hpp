// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/core/error.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// model.safetensors.index.json: which file holds which tensor, as the index claims.
struct CheckpointIndex {
  std::map<std::string, std::string, std::less<>> file_of;  ///< tensor name → file name
};

namespace detail {
/// Only plain names beside the index: an index must not reach out of its folder.
inline void check_shard_name(const std::string& path, const std::string& tensor,
                             const std::string& file) {
  const bool plain = !file.empty() && file != "." && file != ".." &&
                     file.find_first_of(std::string_view{"/\\\0", 3}) == std::string::npos;
  if (!plain) {
    throw FormatError{path, "tensor '" + tensor + "' is placed in '" + printable(file) +
                                "', which is no plain file name in the same folder"};
  }
}
}  // namespace detail

/// @brief Reads an index from its text. `metadata` and its total_size are not looked at: they are
/// stale or wrong in public checkpoints.
/// @throws FormatError naming the path, the tensor and the fault.
[[nodiscard]] inline CheckpointIndex parse_checkpoint_index(const std::string& path,
                                                            std::string_view text) {
  const nlohmann::json document = parse_json(text, path);
  const auto map = document.is_object() ? document.find("weight_map") : document.end();
  if (map == document.end() || !map->is_object()) {
    throw FormatError{path, "the index has no object 'weight_map'"};
  }
  CheckpointIndex index;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) {
      throw FormatError{path, "weight_map of tensor '" + tensor + "' is no file name"};
    }
    detail::check_shard_name(path, tensor, file.get_ref<const std::string&>());
    index.file_of.emplace(tensor, file.get<std::string>());
  }
  if (index.file_of.empty()) throw FormatError{path, "weight_map is empty"};
  return index;
}

/// @copydoc parse_checkpoint_index
/// Reads the file first, at most 256 MiB. @throws StorageError if it cannot be read.
[[nodiscard]] inline CheckpointIndex read_checkpoint_index(const std::filesystem::path& path) {
  return parse_checkpoint_index(path.string(), read_small_file(path, std::uint64_t{256} << 20));
}

}  // namespace block_streamer::inline v1
