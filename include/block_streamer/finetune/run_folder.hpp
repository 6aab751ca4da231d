// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Where a run keeps what, in its output folder. Says names, makes and tidies folders.
class RunFolder {
 public:
  explicit RunFolder(std::filesystem::path path) : path_{std::move(path)} {}

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::filesystem::path state() const {
    return path_ / "resume" / "state.safetensors";
  }
  [[nodiscard]] std::filesystem::path metrics() const { return path_ / "metrics.jsonl"; }
  [[nodiscard]] std::filesystem::path plot() const { return path_ / "loss.svg"; }

  /// @brief True if a run has left its state here, saved or only begun.
  [[nodiscard]] bool holds_run() const {
    std::error_code error;
    return std::filesystem::exists(state(), error);
  }
  /// @brief True if there is nothing here, or only what a run leaves that died while it began.
  [[nodiscard]] bool is_free() const {
    std::error_code error;
    if (!std::filesystem::exists(path_, error)) return true;
    for (const auto& entry : std::filesystem::directory_iterator{path_, error}) {
      if (entry.path() != state().parent_path()) return false;
    }
    if (error) return false;
    if (!std::filesystem::exists(state().parent_path(), error)) return true;
    for (const auto& entry : std::filesystem::directory_iterator{state().parent_path(), error}) {
      if (!is_unfinished_part(entry.path())) return false;
    }
    return !error;
  }
  /// @brief True if a new run may take the folder: nothing is here, or what an earlier run or
  /// whoever wrote an adapter left. Weights of a model beside an adapter are no part of one.
  [[nodiscard]] bool is_replaceable() const {
    if (is_free() || holds_run()) return true;
    std::error_code error;
    if (!std::filesystem::exists(path_ / "adapter_config.json", error)) return false;
    for (const auto& entry : std::filesystem::directory_iterator{path_, error}) {
      const std::filesystem::path name = entry.path().filename();
      const bool weights =
          name.extension() == ".safetensors" && name != "adapter_model.safetensors";
      if (weights || name == "model.safetensors.index.json") return false;
    }
    return !error;
  }
  /// @brief Makes the folders and removes what killed runs left half-written.
  /// @throws StorageError. @pre nobody else writes here.
  void prepare() const {
    std::error_code error;
    std::filesystem::create_directories(state().parent_path(), error);
    if (error) throw StorageError{path_.string(), "no folder can be made there", error};
    for (const auto& folder : {path_, state().parent_path()}) remove_parts(folder);
  }

 private:
  static void remove_parts(const std::filesystem::path& folder) {
    std::error_code error;
    std::vector<std::filesystem::path> parts;
    for (const auto& entry : std::filesystem::directory_iterator{folder, error}) {
      if (is_unfinished_part(entry.path())) parts.push_back(entry.path());
    }
    for (const auto& part : parts) std::filesystem::remove(part, error);
  }

  std::filesystem::path path_;
};

}  // namespace block_streamer::inline v1
