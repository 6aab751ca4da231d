// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/os/file.hpp>
#include <block_streamer/storage/extent_reader.hpp>
#include <block_streamer/storage/pooled.hpp>

#include <cstddef>
#include <utility>

namespace block_streamer::inline v1 {

/// A file read by positional reads through the page cache.
class PositionalFile {
 public:
  [[nodiscard]] static PositionalFile open(const std::filesystem::path& path) {
    File file = File::open(path);
    std::error_code error;
    const std::uint64_t size = file.size(error);
    if (error) throw StorageError{path.string(), "cannot tell the size of the file", error};
    return PositionalFile{std::move(file), size};
  }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::error_code read_at(std::uint64_t offset, std::span<std::byte> out) const {
    return file_.read_at(offset, out);
  }

 private:
  PositionalFile(File file, std::uint64_t size) noexcept : file_{std::move(file)}, size_{size} {}

  File file_;
  std::uint64_t size_;
};
static_assert(file_source<PositionalFile>);

/// @brief A checkpoint's files, read where they lie. The plainest tier and the measure of the
/// others: works on every file system, at any alignment, with files larger than memory.
/// **Errors.** A file that shrank: FileErrc::shrank, never old or foreign bytes.
/// **Threads.** As Pooled. **Cost.** One system call per piece of a file in a read; each byte is
/// copied once, out of the page cache.
class FileStorage : public Pooled<ExtentReader<PositionalFile>> {
 public:
  /// @param threads reads under way at once.
  /// @throws StorageError if a file cannot be opened, or ends before bytes that a block needs.
  explicit FileStorage(BlockMap map, std::size_t threads = 4)
      : Pooled{ExtentReader<PositionalFile>{std::move(map)}, threads} {}
};
static_assert(locating_tier<FileStorage> && !addressable_tier<FileStorage>);

}  // namespace block_streamer::inline v1
