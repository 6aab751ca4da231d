// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/direct_io_windows.hpp>
#include <block_streamer/os/file_windows.hpp>
#include <block_streamer/storage/extent_reader.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// A file read by positional reads, through the system's cache or past it. Its handle is
/// overlapped, so a completion port can read it too.
/// **Threads.** Reads from any, at once.
class PositionalFile {
 public:
  static constexpr const char* direct_words = "FILE_FLAG_NO_BUFFERING";  ///< describes direct()

  /// @param access  direct is a wish: where the file system refuses it, access_note() says why.
  /// @throws StorageError naming the path if it cannot be opened.
  [[nodiscard]] static PositionalFile open(const std::filesystem::path& path,
                                           FileAccess access = FileAccess::cached) {
    std::error_code error;
    PositionalFile file;
    if (access == FileAccess::direct) {
      file.file_ = open_unbuffered(path, error);
    } else {
      file.file_ = {detail::open_overlapped(path, 0, error), {1, "not asked for"}};
    }
    if (error) throw StorageError{path.string(), "cannot open the file", error};
    file.size_ = detail::file_size(file.native_handle(), error);
    if (error) throw StorageError{path.string(), "cannot tell the size of the file", error};
    return file;
  }

  /// @brief As it was when opened, in bytes.
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] HANDLE native_handle() const noexcept { return file_.handle.get(); }
  /// @brief What offsets, addresses and lengths of reads must be multiples of; 1 through the cache.
  [[nodiscard]] std::uint32_t alignment() const noexcept { return file_.direct.alignment; }
  /// @brief Why reads go through the system's cache; empty where they do not.
  [[nodiscard]] const std::string& access_note() const noexcept { return file_.direct.refusal; }

  /// @brief True if reads go past the system's cache.
  [[nodiscard]] bool direct() const noexcept { return file_.direct.works(); }

  /// @brief Waits for its reads; a completion port that the file is attached to hears of none.
  [[nodiscard]] std::error_code read_at(std::uint64_t offset, std::span<std::byte> out) const {
    return read_padded(offset, out, out.size());
  }
  /// @pre offset, address and size of `out` are multiples of alignment().
  [[nodiscard]] std::error_code read_padded(std::uint64_t offset, std::span<std::byte> out,
                                            std::size_t needed) const {
    while (needed != 0) {
      const std::size_t wanted = std::min<std::size_t>(
          {out.size(), static_cast<std::size_t>(round_up(needed, alignment())), largest_read});
      std::error_code error;
      const std::size_t got =
          detail::read_and_wait(native_handle(), offset, out.first(wanted), error);
      if (error) return error;
      if (got >= needed) break;
      // Unbuffered reads know no other offsets than whole sectors.
      const auto whole = static_cast<std::size_t>(round_down(got, alignment()));
      if (whole == 0) return FileErrc::shrank;
      out = out.subspan(whole);
      offset += whole;
      needed -= whole;
    }
    return {};
  }

 private:
  static constexpr std::size_t largest_read = std::size_t{1} << 30;

  PositionalFile() noexcept = default;

  UnbufferedFile file_;
  std::uint64_t size_ = 0;
};
static_assert(padded_file_source<PositionalFile>);

}  // namespace block_streamer::inline v1
