// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/direct_io_posix.hpp>
#include <block_streamer/os/direct_io_read.hpp>
#include <block_streamer/os/file_posix.hpp>
#include <block_streamer/storage/extent_reader.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// A file read by positional reads, through the page cache or past it.
/// **Threads.** Reads from any, at once.
class PositionalFile {
 public:
  static constexpr const char* direct_words = "O_DIRECT";  ///< what describes direct()

  /// @param access  direct is a wish: where the file system refuses it, access_note() says why.
  /// @throws StorageError naming the path if it cannot be opened.
  [[nodiscard]] static PositionalFile open(const std::filesystem::path& path,
                                           FileAccess access = FileAccess::cached) {
    File file = File::open(path);
    std::error_code error;
    const std::uint64_t size = file.size(error);
    if (error) throw StorageError{path.string(), "cannot tell the size of the file", error};
    DirectIo direct{1, "not asked for"};
    if (access == FileAccess::direct) direct = enable_direct_io(file);
    return PositionalFile{std::move(file), size, std::move(direct)};
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] int native_handle() const noexcept { return file_.native_handle(); }
  /// @brief What offsets, addresses and lengths of reads must be multiples of; 1 through the page
  /// cache.
  [[nodiscard]] std::uint32_t alignment() const noexcept { return direct_.alignment; }
  /// @brief True if reads go past the page cache at this moment: the descriptor is asked.
  [[nodiscard]] bool direct() const noexcept { return detail::is_direct(native_handle()); }
  /// @brief Why reads go through the page cache; empty where they do not.
  [[nodiscard]] std::string access_note() const {
    if (direct()) return {};
    return direct_.works() ? "the file system accepted O_DIRECT and then refused a read"
                           : direct_.refusal;
  }

  [[nodiscard]] std::error_code read_at(std::uint64_t offset, std::span<std::byte> out) const {
    return read_padded(offset, out, out.size());
  }
  /// @pre offset, address and size of `out` are multiples of alignment().
  [[nodiscard]] std::error_code read_padded(std::uint64_t offset, std::span<std::byte> out,
                                            std::size_t needed) const {
    if (direct_.alignment == 1) return file_.read_at(offset, out.first(needed));
    return DirectIoRead{native_handle(), offset, out, needed, direct_.alignment}.finish();
  }

 private:
  PositionalFile(File file, std::uint64_t size, DirectIo direct) noexcept
      : file_{std::move(file)}, size_{size}, direct_{std::move(direct)} {}

  File file_;
  std::uint64_t size_;
  DirectIo direct_;  ///< as it was when opened
};
static_assert(padded_file_source<PositionalFile>);

}  // namespace block_streamer::inline v1
