// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_posix.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A file written beside its final place and moved there whole by commit(). Until then, and
/// after any failure, whatever lay at that place is untouched; an uncommitted file is removed.
/// A link at that place is followed: its target is replaced.
class ReplacingFile {
 public:
  /// @throws StorageError if no file can be made in the folder of `path`, or if something that is
  /// no regular file (a device, a pipe, a folder) has this name.
  explicit ReplacingFile(const std::filesystem::path& path) : path_{target_of(path)} {
    const std::filesystem::path parent = path_.parent_path();
    folder_ = parent.empty() ? "." : parent;
    for (int attempt = 0; descriptor_ < 0; ++attempt) {
      const std::string number = std::to_string(::getpid()) + '-' + std::to_string(attempt);
      temporary_ = folder_ / ('.' + path_.filename().string() + ".part" + number);
      descriptor_ =
          ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode_of(path_));
      if (descriptor_ < 0 && errno != EINTR && (errno != EEXIST || attempt == 1000)) {
        throw StorageError{path_.string(), "cannot write in this folder",
                           detail::last_system_error()};
      }
    }
  }
  ReplacingFile(const ReplacingFile&) = delete;
  ReplacingFile& operator=(const ReplacingFile&) = delete;
  ~ReplacingFile() { discard(); }

  /// @brief Appends bytes. @throws StorageError if not all of them could be written.
  void append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t put =
          ::write(descriptor_, bytes.data(), std::min(bytes.size(), std::size_t{1} << 30));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail("writing failed; what was there before is untouched");
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
  }

  /// @brief Makes the bytes durable, moves the file to its place, and makes the move durable.
  /// @throws StorageError; the old file is then whole, unless only the last step failed: then the
  /// new one is, and a crash might bring the old one back.
  void commit() {
    if (::fsync(descriptor_) != 0) fail("writing to disk failed");
    if (::close(std::exchange(descriptor_, -1)) != 0) fail("closing the written file failed");
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("moving into place failed");
    temporary_.clear();
    const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) fail("opening the folder failed");
    const bool synced = ::fsync(folder) == 0 || errno == EINVAL;  // some file systems cannot
    const std::error_code error = detail::last_system_error();
    static_cast<void>(::close(folder));
    if (!synced) throw StorageError{path_.string(), "writing the folder to disk failed", error};
  }

 private:
  [[nodiscard]] static std::filesystem::path target_of(const std::filesystem::path& path) {
    std::error_code ignored;
    const std::filesystem::file_status status = std::filesystem::status(path, ignored);
    if (exists(status) && !is_regular_file(status)) {
      throw StorageError{path.string(), "is no regular file: it is not replaced"};
    }
    if (!std::filesystem::is_symlink(path, ignored)) return path;
    const std::filesystem::path target = std::filesystem::weakly_canonical(path, ignored);
    return ignored ? path : target;
  }
  /// The permissions of the file to be replaced; the usual ones for a new file.
  [[nodiscard]] static mode_t mode_of(const std::filesystem::path& path) noexcept {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 ? status.st_mode & 0777 : 0666;
  }

  [[noreturn]] void fail(const char* what) {
    const std::error_code error = detail::last_system_error();
    discard();
    throw StorageError{path_.string(), what, error};
  }
  void discard() noexcept {
    if (descriptor_ >= 0) static_cast<void>(::close(std::exchange(descriptor_, -1)));
    if (!temporary_.empty()) static_cast<void>(::unlink(temporary_.c_str()));
    temporary_.clear();
  }

  std::filesystem::path path_;
  std::filesystem::path folder_;
  std::filesystem::path temporary_;  ///< empty once it is moved or removed
  int descriptor_ = -1;
};

/// @brief Replaces the content of `path` as a whole: either all of it becomes `bytes`, or nothing
/// changes. @throws StorageError as ReplacingFile.
inline void atomic_replace(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  ReplacingFile file{path};
  file.append(bytes);
  file.commit();
}

/// @copydoc atomic_replace
inline void atomic_replace(const std::filesystem::path& path, std::string_view text) {
  atomic_replace(path, std::as_bytes(std::span{text}));
}

}  // namespace block_streamer::inline v1
