// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/checkpoint_index.hpp>
#include <block_streamer/core/error.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1::detail {

/// Which files make up a checkpoint.
struct CheckpointFiles {
  std::filesystem::path folder;
  std::vector<std::filesystem::path> files;  ///< sorted
  CheckpointIndex index;                     ///< empty without an index
  std::vector<std::string> warnings;
};

inline constexpr const char* single_file_name = "model.safetensors";
inline constexpr const char* index_file_name = "model.safetensors.index.json";

/// True if the entry is there, also as a link that leads nowhere.
[[nodiscard]] inline bool is_listed(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
}

/// The *.safetensors files of the folder itself, sorted.
[[nodiscard]] inline std::vector<std::filesystem::path> list_safetensors(
    const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  std::filesystem::directory_iterator at{folder, error};
  for (; !error && at != std::filesystem::directory_iterator{}; at.increment(error)) {
    if (at->path().extension() == ".safetensors") files.push_back(at->path());
  }
  if (error) throw StorageError{folder.string(), "cannot list the folder", error};
  std::sort(files.begin(), files.end());
  return files;
}

/// @throws StorageError naming the shard and one of its tensors if it is not there.
inline void require_shard(const std::filesystem::path& file, const std::string& tensor) {
  std::error_code ignored;
  if (std::filesystem::exists(file, ignored)) return;
  const bool link = is_listed(file);
  throw StorageError{file.string(), std::string{link ? "the link leads nowhere" : "missing"} +
                                        ", the index places tensor '" + tensor +
                                        "' in this file; download it again"};
}

/// The files that the index names; others of the folder are reported.
[[nodiscard]] inline CheckpointFiles files_of_index(const std::filesystem::path& folder) {
  CheckpointFiles found{folder, {}, read_checkpoint_index(folder / index_file_name), {}};
  std::map<std::string, std::string> tensor_in;
  for (const auto& [tensor, file] : found.index.file_of) tensor_in.emplace(file, tensor);
  for (const auto& [file, tensor] : tensor_in) {
    require_shard(folder / file, tensor);
    found.files.push_back(folder / file);
  }
  for (const std::filesystem::path& file : list_safetensors(folder)) {
    if (tensor_in.count(file.filename().string()) == 0) {
      found.warnings.push_back(file.string() + ": ignored, the index does not mention this file");
    }
  }
  return found;
}

/// A folder with neither model.safetensors nor an index.
[[nodiscard]] inline CheckpointFiles only_file_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files = list_safetensors(folder);
  if (files.size() == 1) return {folder, std::move(files), {}, {}};
  if (files.empty()) {
    const bool cache = is_listed(folder / "snapshots");
    throw StorageError{folder.string(),
                       cache ? "this is a hub cache; open one of the folders in 'snapshots'"
                             : "no model.safetensors, no model.safetensors.index.json and no other "
                               ".safetensors file in this folder"};
  }
  throw StorageError{folder.string(), std::to_string(files.size()) +
                                          " .safetensors files but no model.safetensors.index.json;"
                                          " download the index, or open one of the files"};
}

[[nodiscard]] inline CheckpointFiles find_checkpoint_files(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    const bool link = is_listed(path);
    throw StorageError{path.string(), link ? "the link leads nowhere" : "no such folder or file"};
  }
  if (!std::filesystem::is_directory(status)) {
    const std::filesystem::path parent = path.parent_path();
    return {parent.empty() ? "." : parent, {path}, {}, {}};
  }
  if (!is_listed(path / single_file_name)) {
    return is_listed(path / index_file_name) ? files_of_index(path) : only_file_of(path);
  }
  if (!std::filesystem::exists(path / single_file_name, error)) {
    throw StorageError{(path / single_file_name).string(),
                       "the link leads nowhere; download the file again"};
  }
  CheckpointFiles found{path, {path / single_file_name}, {}, {}};
  for (const std::filesystem::path& file : list_safetensors(path)) {
    if (file.filename() != single_file_name) {
      found.warnings.push_back(file.string() + ": ignored beside " + single_file_name);
    }
  }
  return found;
}

}  // namespace block_streamer::inline v1::detail
