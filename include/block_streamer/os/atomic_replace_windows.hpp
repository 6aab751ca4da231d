// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

namespace block_streamer::inline v1 {

/// @brief A file written beside its final place and moved there whole by commit(). Until then, and
/// after any failure, whatever lay at that place is untouched; an uncommitted file is removed.
/// A link at that place is followed: its target is replaced. The new file has the folder's
/// inherited permissions. A file that is marked read-only, or that somebody has open without
/// sharing its deletion, is not replaced: commit() fails.
class ReplacingFile {
 public:
  /// @throws StorageError if no file can be made in the folder of `path`, or if something that is
  /// no regular file (a device, a pipe, a folder) has this name.
  explicit ReplacingFile(const std::filesystem::path& path) : path_{target_of(path)} {
    const std::filesystem::path parent = path_.parent_path();
    const std::filesystem::path folder = parent.empty() ? "." : parent;
    const std::string suffix = ".part" + std::to_string(::GetCurrentProcessId()) + "-";
    for (int attempt = 0; !file_; ++attempt) {
      temporary_ = folder / ".";
      temporary_ += path_.filename();
      temporary_ += suffix + std::to_string(attempt);
      file_ = detail::WindowsHandle{::CreateFileW(temporary_.c_str(), GENERIC_WRITE, 0, nullptr,
                                                  CREATE_NEW, FILE_ATTRIBUTE_NORMAL, nullptr)};
      if (file_) return;
      const DWORD code = ::GetLastError();
      if ((code != ERROR_FILE_EXISTS && code != ERROR_ALREADY_EXISTS) || attempt == 1000) {
        temporary_.clear();
        throw StorageError{path_.string(), "cannot write in this folder",
                           detail::windows_error(code)};
      }
    }
  }
  ReplacingFile(const ReplacingFile&) = delete;
  ReplacingFile& operator=(const ReplacingFile&) = delete;
  ~ReplacingFile() { discard(); }

  /// @brief Appends bytes. @throws StorageError if not all of them could be written.
  void append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto wanted = static_cast<DWORD>(std::min(bytes.size(), std::size_t{1} << 30));
      DWORD put = 0;
      if (::WriteFile(file_.get(), bytes.data(), wanted, &put, nullptr) == 0 || put == 0) {
        fail("writing failed; what was there before is untouched");
      }
      bytes = bytes.subspan(put);
    }
  }

  /// @brief Makes the bytes durable and moves the file to its place, which is durable too when this
  /// returns. @throws StorageError; the old file is then whole.
  void commit() {
    if (::FlushFileBuffers(file_.get()) == 0) fail("writing to disk failed");
    if (!file_.close()) fail("closing the written file failed");
    if (::MoveFileExW(temporary_.c_str(), path_.c_str(),
                      MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH) == 0) {
      fail("moving into place failed");
    }
    temporary_.clear();
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

  [[noreturn]] void fail(const char* what) {
    const std::error_code error = detail::last_system_error();
    discard();
    throw StorageError{path_.string(), what, error};
  }
  void discard() noexcept {
    static_cast<void>(file_.close());
    if (!temporary_.empty()) static_cast<void>(::DeleteFileW(temporary_.c_str()));
    temporary_.clear();
  }

  std::filesystem::path path_;
  std::filesystem::path temporary_;  ///< empty once it is moved or removed
  detail::WindowsHandle file_;
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
