// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_error.hpp>
#include <block_streamer/os/file_posix.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A file for bytes that are of use only while it is open. It loses its name at once, so its
/// space is free again when it is closed, also if the process is killed.
/// **Threads.** Reads and writes from many at once, each byte by one of them.
class ScratchFile {
 public:
  /// @throws StorageError naming the folder if no file can be made there.
  explicit ScratchFile(const std::filesystem::path& folder) {
    for (int attempt = 0; descriptor_ < 0; ++attempt) {
      const auto path = folder / (".block_streamer-" + std::to_string(::getpid()) + '-' +
                                  std::to_string(attempt) + ".scratch");
      descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
      if (descriptor_ >= 0) {
        static_cast<void>(::unlink(path.c_str()));
      } else if (errno != EINTR && (errno != EEXIST || attempt == 1000)) {
        throw StorageError{folder.string(), "cannot make a file in this folder",
                           detail::last_system_error()};
      }
    }
  }
  ScratchFile(ScratchFile&& other) noexcept : descriptor_{std::exchange(other.descriptor_, -1)} {}
  ScratchFile& operator=(ScratchFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~ScratchFile() {
    if (descriptor_ >= 0) static_cast<void>(::close(descriptor_));
  }

  /// @brief Writes all of `bytes` from `offset` on. @returns the system's error, such as a full
  /// disk; what was written until then is undefined.
  [[nodiscard]] std::error_code write_at(std::uint64_t offset,
                                         std::span<const std::byte> bytes) const noexcept {
    constexpr auto last = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
    if (offset > last || bytes.size() > last - offset)
      return std::make_error_code(std::errc::file_too_large);
    while (!bytes.empty()) {
      const ssize_t put = ::pwrite(descriptor_, bytes.data(), std::min(bytes.size(), largest_piece),
                                   static_cast<off_t>(offset));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return detail::last_system_error();
      if (put == 0) return std::make_error_code(std::errc::no_space_on_device);
      bytes = bytes.subspan(static_cast<std::size_t>(put));
      offset += static_cast<std::uint64_t>(put);
    }
    return {};
  }
  /// @brief Fills `out` from `offset` on. @returns FileErrc::shrank if there is not so much.
  [[nodiscard]] std::error_code read_at(std::uint64_t offset,
                                        std::span<std::byte> out) const noexcept {
    while (!out.empty()) {
      const ssize_t got = ::pread(descriptor_, out.data(), std::min(out.size(), largest_piece),
                                  static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return detail::last_system_error();
      if (got == 0) return FileErrc::shrank;
      out = out.subspan(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
    }
    return {};
  }

 private:
  static constexpr std::size_t largest_piece = std::size_t{1} << 30;

  int descriptor_ = -1;
};

}  // namespace block_streamer::inline v1
