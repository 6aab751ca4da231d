// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/storage/direct_extents.hpp>
#include <block_streamer/storage/extent_reader.hpp>
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/positional_file.hpp>
#include <block_streamer/storage/read_threads.hpp>

#include <cstddef>
#include <string>
#include <utility>

namespace block_streamer::inline v1 {

struct FileStorageOptions {
  /// Reads under way at once.
  std::size_t threads = default_read_threads();
  /// direct: past the page cache, which holds nothing of a model larger than memory by the time it
  /// is read again, and costs a copy. The images' read_granularity then is the file system's.
  FileAccess access = FileAccess::cached;
};

/// @brief A checkpoint's files, read where they lie. The plainest tier and the measure of the
/// others: works on every file system, at any alignment, with files larger than memory.
/// **Errors.** A file that shrank: FileErrc::shrank, never old or foreign bytes.
/// **Threads.** As Pooled. **Cost.** One system call per piece of a file in a read; through the
/// page cache each byte is copied once, out of it. Direct: what rounding outwards adds, less than
/// two blocks of the file system a range.
class FileStorage : public Pooled<ExtentReader<PositionalFile>> {
 public:
  /// @throws StorageError if a file cannot be opened, or ends before bytes that a block needs.
  explicit FileStorage(BlockMap map, FileStorageOptions options)
      : Pooled{open_extents(std::move(map), options.access), options.threads} {}
  /// @param threads reads under way at once, through the page cache.
  explicit FileStorage(BlockMap map, std::size_t threads = default_read_threads())
      : FileStorage{std::move(map), FileStorageOptions{threads, FileAccess::cached}} {}

  /// @brief How the files are read: past the page cache, or through it and why.
  [[nodiscard]] std::string describe() const { return describe_access(reader()); }
};
static_assert(locating_tier<FileStorage> && !addressable_tier<FileStorage>);

}  // namespace block_streamer::inline v1
