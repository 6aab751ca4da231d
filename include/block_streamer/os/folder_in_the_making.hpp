// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/folder_lock.hpp>

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// Where a folder is to be made: of a link, the folder that it names.
/// @throws Error if something is there that is no empty folder.
[[nodiscard]] inline std::filesystem::path empty_target(std::filesystem::path target) {
  if (!target.has_filename()) target = target.parent_path();  // "folder/"
  std::error_code error;
  const std::string name = target.string();
  const auto status = std::filesystem::status(target, error);
  if (!std::filesystem::status_known(status)) {
    throw StorageError{name, "cannot be looked at", error};
  }
  if (!std::filesystem::exists(status)) {
    const bool link = std::filesystem::is_symlink(std::filesystem::symlink_status(target, error));
    if (link) throw Error{name + " is a link to nothing; name a folder"};
    return target;
  }
  if (!std::filesystem::is_directory(status)) {
    throw Error{name + " is there already and no folder; name another place"};
  }
  const bool empty = std::filesystem::is_empty(target, error);
  if (error) throw StorageError{name, "cannot list the folder", error};
  if (!empty) throw Error{name + " is there already and not empty; name another folder"};
  return std::filesystem::canonical(target);
}

}  // namespace detail

/// @brief A folder in the making beside its place, removed unless commit() moves it there: it
/// appears whole or not at all. One process at a time makes it.
/// **Threads.** Externally synchronised.
class FolderInTheMaking {
 public:
  /// @param suffix  of its name beside the place: ".merging" makes "folder" as ".folder.merging".
  /// What a killed process left there is removed.
  /// @throws Error if something is at the place that is no empty folder, or another process makes
  /// it; StorageError if it cannot be made.
  FolderInTheMaking(const std::filesystem::path& target, const std::string& suffix)
      : target_{detail::empty_target(target)},
        path_{place_beside(target_, suffix)},
        lock_{FolderLock::of(path_)} {
    try {
      target_ =
          detail::empty_target(target);  // another may have finished it before the lock was ours
      clear();
    } catch (...) {
      discard();
      throw;
    }
  }
  FolderInTheMaking(const FolderInTheMaking&) = delete;
  FolderInTheMaking& operator=(const FolderInTheMaking&) = delete;
  ~FolderInTheMaking() { discard(); }

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// @throws StorageError if it cannot be moved; Error if something has come to its place.
  void commit() {
    std::error_code error;
    (void)detail::empty_target(target_);
    std::filesystem::remove(target_, error);  // empty
    std::filesystem::rename(path_, target_, error);
    if (error) throw StorageError{target_.string(), "moving the folder into place failed", error};
    path_.clear();
  }

 private:
  /// What is cleared there is ours: a link that leads elsewhere goes.
  [[nodiscard]] static std::filesystem::path place_beside(const std::filesystem::path& target,
                                                          const std::string& suffix) {
    std::filesystem::path path = target.parent_path() / ("." + target.filename().string() + suffix);
    std::error_code error;
    if (std::filesystem::is_symlink(std::filesystem::symlink_status(path, error))) {
      std::filesystem::remove(path, error);
    }
    return path;
  }
  /// What a killed process left. The folder itself stays: it is what is locked.
  void clear() const {
    std::vector<std::filesystem::path> left;
    for (const auto& entry : std::filesystem::directory_iterator{path_})
      left.push_back(entry.path());
    for (const auto& path : left) std::filesystem::remove_all(path);
  }
  void discard() noexcept {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }

  std::filesystem::path target_;
  std::filesystem::path path_;  ///< empty once it is moved
  FolderLock lock_;
};

}  // namespace block_streamer::inline v1
