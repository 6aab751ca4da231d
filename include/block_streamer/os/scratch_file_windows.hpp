// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_error.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>

namespace block_streamer::inline v1 {

/// @brief A file for bytes that are of use only while it is open, as its twin for POSIX systems.
/// Here it has a name, which goes when it is closed, also if the process is killed.
/// **Threads.** Reads and writes from many at once, each byte by one of them.
class ScratchFile {
 public:
  /// @throws StorageError naming the folder if no file can be made there.
  explicit ScratchFile(const std::filesystem::path& folder) {
    for (int attempt = 0; !file_; ++attempt) {
      const auto path = folder / (".block_streamer-" + std::to_string(::GetCurrentProcessId()) +
                                  '-' + std::to_string(attempt) + ".scratch");
      file_ = detail::WindowsHandle{
          ::CreateFileW(path.c_str(), GENERIC_READ | GENERIC_WRITE, FILE_SHARE_DELETE, nullptr,
                        CREATE_NEW, FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE, nullptr)};
      if (!file_ && (::GetLastError() != ERROR_FILE_EXISTS || attempt == 1000)) {
        throw StorageError{folder.string(), "cannot make a file in this folder",
                           detail::last_system_error()};
      }
    }
  }

  /// @brief Writes all of `bytes` from `offset` on. @returns the system's error, such as a full
  /// disk; what was written until then is undefined.
  [[nodiscard]] std::error_code write_at(std::uint64_t offset,
                                         std::span<const std::byte> bytes) const noexcept {
    while (!bytes.empty()) {
      OVERLAPPED place = at(offset);
      DWORD put = 0;
      const auto wanted = static_cast<DWORD>(std::min(bytes.size(), largest_piece));
      if (::WriteFile(file_.get(), bytes.data(), wanted, &put, &place) == 0)
        return detail::last_system_error();
      if (put == 0) return std::make_error_code(std::errc::no_space_on_device);
      bytes = bytes.subspan(put);
      offset += put;
    }
    return {};
  }
  /// @brief Fills `out` from `offset` on. @returns FileErrc::shrank if there is not so much.
  [[nodiscard]] std::error_code read_at(std::uint64_t offset,
                                        std::span<std::byte> out) const noexcept {
    while (!out.empty()) {
      OVERLAPPED place = at(offset);
      DWORD got = 0;
      const auto wanted = static_cast<DWORD>(std::min(out.size(), largest_piece));
      if (::ReadFile(file_.get(), out.data(), wanted, &got, &place) == 0 &&
          ::GetLastError() != ERROR_HANDLE_EOF) {
        return detail::last_system_error();
      }
      if (got == 0) return FileErrc::shrank;
      out = out.subspan(got);
      offset += got;
    }
    return {};
  }

 private:
  static constexpr std::size_t largest_piece = std::size_t{1} << 30;

  [[nodiscard]] static OVERLAPPED at(std::uint64_t offset) noexcept {
    OVERLAPPED place{};
    place.Offset = static_cast<DWORD>(offset);
    place.OffsetHigh = static_cast<DWORD>(offset >> 32);
    return place;
  }

  detail::WindowsHandle file_;
};

}  // namespace block_streamer::inline v1
