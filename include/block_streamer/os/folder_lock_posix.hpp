// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_posix.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A folder that one process works in: whoever locks it next is refused, until this object
/// or its process ends, however it ends. Nothing is written for it. It binds only those who ask.
/// Where the file system has no locks of this kind, nobody is refused.
class FolderLock {
 public:
  FolderLock() noexcept = default;

  /// @brief Makes the folder, if there is none, and locks it.
  /// @throws StorageError if it is no folder or cannot be made or opened; Error if it is in use.
  [[nodiscard]] static FolderLock of(const std::filesystem::path& folder) {
    for (;;) {
      std::error_code error;
      std::filesystem::create_directories(folder, error);
      if (error) throw StorageError{folder.string(), "no folder can be made there", error};
      FolderLock lock;
      // Another holder may have moved or removed it since: then it is another folder that counts.
      if (!lock.open(folder)) continue;
      lock.lock(folder);
      if (lock.is_at(folder)) return lock;
    }
  }

  FolderLock(FolderLock&& other) noexcept : descriptor_{std::exchange(other.descriptor_, -1)} {}
  FolderLock& operator=(FolderLock&& other) noexcept {
    if (this != &other) {
      release();
      descriptor_ = std::exchange(other.descriptor_, -1);
    }
    return *this;
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() { release(); }

  void release() noexcept {
    if (descriptor_ >= 0) static_cast<void>(::close(std::exchange(descriptor_, -1)));
  }

 private:
  /// @returns false if there is no such folder any more.
  bool open(const std::filesystem::path& folder) {
    do {
      descriptor_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    } while (descriptor_ < 0 && errno == EINTR);
    if (descriptor_ >= 0) return true;
    if (errno == ENOENT) return false;
    throw StorageError{folder.string(), "cannot open the folder", detail::last_system_error()};
  }
  void lock(const std::filesystem::path& folder) const {
    int result = 0;
    do {
      result = ::flock(descriptor_, LOCK_EX | LOCK_NB);
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno == EWOULDBLOCK) {
      throw Error{folder.string() + " is in use by another process; wait for it or name another"};
    }
  }
  [[nodiscard]] bool is_at(const std::filesystem::path& folder) const noexcept {
    struct stat held {};
    struct stat there {};
    return ::fstat(descriptor_, &held) == 0 && ::stat(folder.c_str(), &there) == 0 &&
           held.st_dev == there.st_dev && held.st_ino == there.st_ino;
  }

  int descriptor_ = -1;
};

}  // namespace block_streamer::inline v1
