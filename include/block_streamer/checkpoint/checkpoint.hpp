// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/checkpoint_files.hpp>
#include <block_streamer/checkpoint/checkpoint_index.hpp>
#include <block_streamer/checkpoint/safetensors_header.hpp>
#include <block_streamer/checkpoint/shard_folder.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/checkpoint/shard_manifest_reader.hpp>
#include <block_streamer/checkpoint/stored_tensor.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The tensors of a model as its safetensors files hold them: names, types, shapes and byte
/// ranges, every one checked. No weight is read.
/// Names come from the files' own headers; an index only says which files to open.
/// **Threads.** Immutable once open. **Cost.** One header read per file; look-up is O(log n).
class Checkpoint {
 public:
  /// @brief Opens a folder (with model.safetensors, or with model.safetensors.index.json and its
  /// shards, or with a single *.safetensors file; links are followed, so a hub snapshot is a
  /// folder), or one .safetensors file. Sub-folders are never searched.
  /// A folder that a conversion is still being written into is refused.
  /// @throws StorageError if a file is missing or unreadable, naming file and a tensor it holds.
  /// @throws FormatError if a file or the index breaks its format, or two files hold one tensor and
  /// the index does not choose; if a manifest breaks its format or a packed file is not of its
  /// size.
  /// @throws UnsupportedError if the folder's manifest is of a newer version.
  [[nodiscard]] static Checkpoint open(const std::filesystem::path& path) {
    Checkpoint checkpoint;
    std::error_code ignored;
    expect_conversion_ended(std::filesystem::is_directory(path, ignored) ? path
                                                                         : path.parent_path());
    detail::CheckpointFiles found = detail::find_checkpoint_files(path);
    checkpoint.folder_ = std::move(found.folder);
    checkpoint.files_ = std::move(found.files);
    checkpoint.warnings_ = std::move(found.warnings);
    checkpoint.claimed_ = std::move(found.index.file_of);
    checkpoint.manifest_ = find_shard_manifest(checkpoint.folder_);
    for (std::uint32_t file = 0; file < checkpoint.files_.size(); ++file) {
      checkpoint.add_file(file);
    }
    checkpoint.sort_tensors();
    checkpoint.compare_with_index();
    return checkpoint;
  }

  /// @brief All tensors of carried types, sorted by name.
  [[nodiscard]] std::span<const StoredTensor> tensors() const noexcept { return tensors_; }
  /// @brief Tensors of types that are not carried, sorted by name. Using one is refused by at().
  [[nodiscard]] std::span<const UnsupportedTensor> unsupported() const noexcept {
    return unsupported_;
  }
  /// @brief The tensors whose names begin with `prefix`, sorted by name.
  [[nodiscard]] std::span<const StoredTensor> with_prefix(std::string_view prefix) const noexcept {
    const auto begin = std::lower_bound(
        tensors_.begin(), tensors_.end(), prefix,
        [](const StoredTensor& t, std::string_view name) { return t.spec.name < name; });
    const auto end = std::find_if_not(begin, tensors_.end(), [prefix](const StoredTensor& t) {
      return t.spec.name.starts_with(prefix);
    });
    return {begin, end};
  }
  /// @brief The tensor of that full name, or nullptr; nullptr also for a type that is not carried.
  [[nodiscard]] const StoredTensor* find(std::string_view name) const noexcept {
    const auto at = std::lower_bound(
        tensors_.begin(), tensors_.end(), name,
        [](const StoredTensor& t, std::string_view wanted) { return t.spec.name < wanted; });
    return at != tensors_.end() && at->spec.name == name ? &*at : nullptr;
  }
  /// @throws BindingError naming the tensor, the folder and the next action if it is missing.
  /// @throws UnsupportedError naming tensor, type and file if its type is not carried.
  [[nodiscard]] const StoredTensor& at(std::string_view name) const {
    if (const StoredTensor* tensor = find(name)) return *tensor;
    refuse_missing(std::string{name});
  }

  /// @brief The files that hold the tensors; StoredTensor::file counts into it.
  [[nodiscard]] std::span<const std::filesystem::path> files() const noexcept { return files_; }
  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }
  /// @brief The checksums that lie beside the weights, or nullptr. Sizes of files agree with them.
  [[nodiscard]] const ShardManifest* manifest() const noexcept {
    return manifest_ ? &*manifest_ : nullptr;
  }
  /// @brief What is odd but usable, one line each: to be shown to the user once.
  [[nodiscard]] std::span<const std::string> warnings() const noexcept { return warnings_; }

 private:
  Checkpoint() = default;

  void add_file(std::uint32_t file) {
    const std::string file_name = files_[file].filename().string();
    SafetensorsHeader header = read_safetensors_header(files_[file]);
    compare_with_manifest(file_name, header.file_byte_count);
    // Where two files hold one name, the index chooses: shards of an older split may still lie
    // here.
    const auto elsewhere = [&](std::string_view name) {
      const auto claim = claimed_.find(name);
      return claim != claimed_.end() && claim->second != file_name;
    };
    std::size_t stale = 0;
    const auto add_all = [&](auto& from, auto& to, auto name_of_tensor) {
      for (auto& tensor : from) {
        if (is_shard_padding(name_of_tensor(tensor))) continue;
        if (elsewhere(name_of_tensor(tensor))) {
          ++stale;
          continue;
        }
        tensor.file = file;
        to.push_back(std::move(tensor));
      }
    };
    add_all(header.tensors, tensors_,
            [](const StoredTensor& t) -> std::string_view { return t.spec.name; });
    add_all(header.unsupported, unsupported_,
            [](const UnsupportedTensor& t) -> std::string_view { return t.name; });
    if (stale != 0) {
      warnings_.push_back(files_[file].string() + ": " + std::to_string(stale) +
                          " tensors are ignored, the index places them in other files");
    }
  }

  void sort_tensors() {
    std::sort(tensors_.begin(), tensors_.end(),
              [](const auto& a, const auto& b) { return a.spec.name < b.spec.name; });
    std::sort(unsupported_.begin(), unsupported_.end(),
              [](const auto& a, const auto& b) { return a.name < b.name; });
    const auto twice =
        std::adjacent_find(tensors_.begin(), tensors_.end(),
                           [](const auto& a, const auto& b) { return a.spec.name == b.spec.name; });
    if (twice == tensors_.end()) return;
    throw FormatError{files_[twice->file].string(), "tensor '" + twice->spec.name +
                                                        "' is also in " +
                                                        files_[std::next(twice)->file].string() +
                                                        ", and no index says which one counts"};
  }

  /// A packed file of another size is damaged; an original one was replaced after it was summed.
  void compare_with_manifest(const std::string& file_name, std::uint64_t byte_count) {
    if (!manifest_) return;
    const auto at = std::find_if(manifest_->files.begin(), manifest_->files.end(),
                                 [&](const SummedFile& f) { return f.name == file_name; });
    if (at != manifest_->files.end() && at->byte_count == byte_count) return;
    const std::string path = (folder_ / file_name).string();
    const std::string what = at == manifest_->files.end()
                                 ? "is not in " + std::string{manifest_file_name}
                                 : "has " + std::to_string(byte_count) + " bytes, by " +
                                       std::string{manifest_file_name} + " it has " +
                                       std::to_string(at->byte_count);
    if (manifest_->layout == ShardLayout::packed) {
      throw FormatError{path, what + "; convert the model again"};
    }
    warnings_.push_back(path + ": " + what + "; its checksums are not used, make them again");
    manifest_.reset();
  }

  /// Refusing waits until the tensor is used: tied models ship index entries without data.
  void compare_with_index() {
    std::size_t absent = 0;
    std::string example;
    for (const auto& [name, file] : claimed_) {
      if (find(name) != nullptr || find_unsupported(name) != nullptr) continue;
      if (absent++ == 0) example = "'" + name + "', missing in " + file;
    }
    if (absent != 0) {
      warnings_.push_back(folder_.string() + ": the index names " + std::to_string(absent) +
                          " tensors that its files do not hold (" + example + ")");
    }
  }

  [[nodiscard]] const UnsupportedTensor* find_unsupported(std::string_view name) const noexcept {
    const auto at = std::lower_bound(
        unsupported_.begin(), unsupported_.end(), name,
        [](const UnsupportedTensor& t, std::string_view wanted) { return t.name < wanted; });
    return at != unsupported_.end() && at->name == name ? &*at : nullptr;
  }

  [[noreturn]] void refuse_missing(const std::string& name) const {
    if (const UnsupportedTensor* tensor = find_unsupported(name)) {
      throw UnsupportedError{files_[tensor->file].string() + ": tensor '" + name + "' has type " +
                             tensor->dtype + ", which is not implemented"};
    }
    if (const auto claim = claimed_.find(name); claim != claimed_.end()) {
      throw BindingError{(folder_ / claim->second).string() + ": tensor '" + name +
                         "' is not in this file although the index places it there; download the "
                         "file and the index again, they are of different versions"};
    }
    const std::string where =
        claimed_.empty() ? files_.front().string() + ": tensor '" + name + "' is not in this file"
                         : folder_.string() + ": tensor '" + name + "' is not in the index";
    throw BindingError{where + " (" + std::to_string(tensors_.size()) +
                       " tensors); does config.json belong to another model?"};
  }

  std::filesystem::path folder_;
  std::vector<std::filesystem::path> files_;
  std::vector<StoredTensor> tensors_;
  std::vector<UnsupportedTensor> unsupported_;
  std::map<std::string, std::string, std::less<>> claimed_;  ///< the index; empty without one
  std::optional<ShardManifest> manifest_;
  std::vector<std::string> warnings_;
};

}  // namespace block_streamer::inline v1
