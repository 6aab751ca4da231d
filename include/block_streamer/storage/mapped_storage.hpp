// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/os/file_mapping.hpp>
#include <block_streamer/storage/extent_reader.hpp>
#include <block_streamer/storage/pooled.hpp>

#include <cstddef>
#include <utility>

namespace block_streamer::inline v1 {

/// A file read by copying out of a read-only mapping.
class MappedFile {
 public:
  [[nodiscard]] static MappedFile open(const std::filesystem::path& path) {
    return MappedFile{FileMapping{path}};
  }
  [[nodiscard]] std::uint64_t size() const noexcept { return mapping_.size(); }
  [[nodiscard]] std::error_code read_at(std::uint64_t offset, std::span<std::byte> out) const {
    return mapping_.copy_out(offset, out);
  }

 private:
  explicit MappedFile(FileMapping mapping) noexcept : mapping_{std::move(mapping)} {}

  FileMapping mapping_;
};
static_assert(file_source<MappedFile>);

/// @brief A checkpoint's files, mapped read-only. Pages that are in memory already cost no system
/// call. Page faults, which block, happen on the pool's threads: never on the caller's or the I/O
/// loop's. Not addressable, on purpose: a page of a file on another machine can fail at any touch,
/// and registering mappings with a device has unsettled whole systems.
/// **Errors.** A file that shrank or whose page cannot be served is an error, not a signal.
/// **Threads.** As Pooled.
class MappedStorage : public Pooled<ExtentReader<MappedFile>> {
 public:
  /// @param threads copies, and so page faults, under way at once.
  /// @throws StorageError if a file cannot be mapped, or ends before bytes that a block needs.
  explicit MappedStorage(BlockMap map, std::size_t threads = 4)
      : Pooled{ExtentReader<MappedFile>{std::move(map)}, threads} {}
};
static_assert(locating_tier<MappedStorage> && !addressable_tier<MappedStorage>);

}  // namespace block_streamer::inline v1
