// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_error.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

namespace detail {

/// Opens an existing regular file for overlapped reads. Others may write, rename and delete it
/// meanwhile, as everywhere else. @param flags  FILE_FLAG_* beside FILE_FLAG_OVERLAPPED.
[[nodiscard]] inline WindowsHandle open_overlapped(const std::filesystem::path& path, DWORD flags,
                                                   std::error_code& error) noexcept {
  error.clear();
  // FILE_FLAG_BACKUP_SEMANTICS opens folders too, so that they can be refused by their name.
  WindowsHandle file{::CreateFileW(
      path.c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
      OPEN_EXISTING, FILE_FLAG_OVERLAPPED | FILE_FLAG_BACKUP_SEMANTICS | flags, nullptr)};
  if (!file) {
    error = last_system_error();
    return file;
  }
  BY_HANDLE_FILE_INFORMATION information{};
  if (::GetFileType(file.get()) != FILE_TYPE_DISK) {
    error = std::make_error_code(std::errc::invalid_argument);
  } else if (::GetFileInformationByHandle(file.get(), &information) == 0) {
    error = last_system_error();
  } else if ((information.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) != 0) {
    error = std::make_error_code(std::errc::is_a_directory);
  }
  if (error) file.close();
  return file;
}

[[nodiscard]] inline std::uint64_t file_size(HANDLE file, std::error_code& error) noexcept {
  error.clear();
  LARGE_INTEGER size{};
  if (::GetFileSizeEx(file, &size) != 0) return static_cast<std::uint64_t>(size.QuadPart);
  error = last_system_error();
  return 0;
}

/// Where an overlapped operation begins.
[[nodiscard]] inline OVERLAPPED overlapped_at(std::uint64_t offset) noexcept {
  OVERLAPPED overlapped{};
  overlapped.Offset = static_cast<DWORD>(offset);
  overlapped.OffsetHigh = static_cast<DWORD>(offset >> 32);
  return overlapped;
}

/// One overlapped read, waited for. @returns the bytes read; 0 at the end of the file.
[[nodiscard]] inline std::size_t read_and_wait(HANDLE file, std::uint64_t offset,
                                               std::span<std::byte> out,
                                               std::error_code& error) noexcept {
  error.clear();
  // An event of its own for each read: the file's own would wake every thread that reads it.
  const WindowsHandle done{::CreateEventW(nullptr, TRUE, FALSE, nullptr)};
  OVERLAPPED overlapped = overlapped_at(offset);
  // The lowest bit keeps a completion port, if the file belongs to one, from hearing of this read.
  overlapped.hEvent = reinterpret_cast<HANDLE>(reinterpret_cast<std::uintptr_t>(done.get()) | 1U);
  DWORD got = 0;
  DWORD code = done ? ERROR_SUCCESS : ::GetLastError();
  if (done &&
      ::ReadFile(file, out.data(), static_cast<DWORD>(out.size()), nullptr, &overlapped) == 0) {
    code = ::GetLastError();
  }
  if (code == ERROR_SUCCESS || code == ERROR_IO_PENDING) {
    code = ::GetOverlappedResult(file, &overlapped, &got, TRUE) != 0 ? ERROR_SUCCESS
                                                                     : ::GetLastError();
  }
  if (code != ERROR_SUCCESS && code != ERROR_HANDLE_EOF) error = windows_error(code);
  return code == ERROR_SUCCESS ? got : 0;
}

}  // namespace detail

/// @brief A file open for reading at positions.
/// **Threads.** Every const function may be called from many threads at once: reads carry their own
/// position, and the handle is overlapped, so that they do not queue behind one another.
class File {
 public:
  File() noexcept = default;

  /// @throws StorageError naming the path if it cannot be opened or is no regular file.
  [[nodiscard]] static File open(const std::filesystem::path& path) {
    std::error_code error;
    File file = try_open(path, error);
    if (error) throw StorageError{path.string(), "cannot open the file", error};
    return file;
  }

  /// @brief As open(), with the failure in `error` and an empty File as the result. A folder, a
  /// pipe or a device is refused: their size says nothing about what can be read.
  [[nodiscard]] static File try_open(const std::filesystem::path& path,
                                     std::error_code& error) noexcept {
    File file;
    file.handle_ = detail::open_overlapped(path, 0, error);
    return file;
  }

  [[nodiscard]] bool is_open() const noexcept { return static_cast<bool>(handle_); }
  [[nodiscard]] HANDLE native_handle() const noexcept { return handle_.get(); }

  /// @brief The size now, in bytes. 0 with `error` set if the system refuses to say.
  [[nodiscard]] std::uint64_t size(std::error_code& error) const noexcept {
    return detail::file_size(handle_.get(), error);
  }

  /// @brief Fills all of `out` with the bytes from `offset` on. Short reads and pieces beyond what
  /// one system call moves (4 GiB) are handled here.
  /// @returns FileErrc::shrank if the file ends before `out` is full; else the system's error.
  [[nodiscard]] std::error_code read_at(std::uint64_t offset,
                                        std::span<std::byte> out) const noexcept {
    constexpr auto last_offset =
        static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (offset > last_offset || out.size() > last_offset - offset) return FileErrc::shrank;
    while (!out.empty()) {
      std::error_code error;
      const std::size_t got = detail::read_and_wait(
          handle_.get(), offset, out.first(std::min(out.size(), largest_read)), error);
      if (error) return error;
      if (got == 0) return FileErrc::shrank;
      out = out.subspan(got);
      offset += got;
    }
    return {};
  }

 private:
  static constexpr std::size_t largest_read = std::size_t{1} << 30;

  detail::WindowsHandle handle_;
};

}  // namespace block_streamer::inline v1
