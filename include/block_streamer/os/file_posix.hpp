// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_error.hpp>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

namespace detail {
[[nodiscard]] inline std::error_code last_system_error() noexcept {
  return {errno, std::generic_category()};
}
}  // namespace detail

/// @brief A file open for reading at positions.
/// **Threads.** Every const function may be called from many threads at once: reads carry their own
/// position.
class File {
 public:
  File() noexcept = default;

  /// @throws StorageError naming the path if it cannot be opened or is no regular file.
  [[nodiscard]] static File open(const std::filesystem::path& path) {
    std::error_code error;
    File file = try_open(path, error);
    if (error) {
      const bool too_many = error == std::errc::too_many_files_open ||
                            error == std::errc::too_many_files_open_in_system;
      throw StorageError{path.string(),
                         too_many ? "cannot open the file; raise the limit of open files, ulimit -n"
                                  : "cannot open the file",
                         error};
    }
    return file;
  }

  /// @brief As open(), with the failure in `error` and an empty File as the result. A folder, a
  /// pipe or a device is refused: their size says nothing about what can be read.
  [[nodiscard]] static File try_open(const std::filesystem::path& path,
                                     std::error_code& error) noexcept {
    error.clear();
    File file;
    // O_NONBLOCK: opening a pipe that nobody writes to must not hang; regular files ignore it.
    do {
      file.descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (file.descriptor_ < 0 && errno == EINTR);
    if (file.descriptor_ < 0) {
      error = detail::last_system_error();
      return file;
    }
    struct stat status {};
    if (::fstat(file.descriptor_, &status) != 0) {
      error = detail::last_system_error();
    } else if (!S_ISREG(status.st_mode)) {
      error = std::make_error_code(S_ISDIR(status.st_mode) ? std::errc::is_a_directory
                                                           : std::errc::invalid_argument);
    }
    if (error) file.close();
    return file;
  }

  File(File&& other) noexcept : descriptor_{std::exchange(other.descriptor_, -1)} {}
  File& operator=(File&& other) noexcept {
    if (this != &other) {
      close();
      descriptor_ = std::exchange(other.descriptor_, -1);
    }
    return *this;
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }

  [[nodiscard]] bool is_open() const noexcept { return descriptor_ >= 0; }
  [[nodiscard]] int native_handle() const noexcept { return descriptor_; }

  /// @brief The size now, in bytes. 0 with `error` set if the system refuses to say.
  [[nodiscard]] std::uint64_t size(std::error_code& error) const noexcept {
    error.clear();
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0) {
      error = detail::last_system_error();
      return 0;
    }
    return static_cast<std::uint64_t>(status.st_size);
  }

  /// @brief Fills all of `out` with the bytes from `offset` on. Short reads, interrupted calls and
  /// pieces beyond what one system call moves (2 GiB) are handled here.
  /// @returns FileErrc::shrank if the file ends before `out` is full; else the system's error.
  [[nodiscard]] std::error_code read_at(std::uint64_t offset,
                                        std::span<std::byte> out) const noexcept {
    constexpr auto last_offset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
    if (offset > last_offset || out.size() > last_offset - offset) return FileErrc::shrank;
    while (!out.empty()) {
      const std::size_t wanted = std::min(out.size(), largest_read);
      const ssize_t got = ::pread(descriptor_, out.data(), wanted, static_cast<off_t>(offset));
      if (got > 0) {
        out = out.subspan(static_cast<std::size_t>(got));
        offset += static_cast<std::uint64_t>(got);
      } else if (got == 0) {
        return FileErrc::shrank;
      } else if (errno == EAGAIN) {
        wait_until_readable();
      } else if (errno != EINTR) {
        return detail::last_system_error();
      }
    }
    return {};
  }

 private:
  static constexpr std::size_t largest_read = std::size_t{1} << 30;

  void wait_until_readable() const noexcept {
    pollfd waited{descriptor_, POLLIN, 0};
    static_cast<void>(::poll(&waited, 1, -1));
  }

  void close() noexcept {
    if (descriptor_ >= 0) static_cast<void>(::close(std::exchange(descriptor_, -1)));
  }

  int descriptor_ = -1;
};

}  // namespace block_streamer::inline v1
