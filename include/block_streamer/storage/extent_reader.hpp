// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/extents.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/storage/storage_tier.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One open file, read at positions.
/// - `Source::open(path)`: opens it; throws StorageError naming the path.
/// - `size()`: in bytes, as it was when opened.
/// - `read_at(offset, out)`: fills `out`, or an error if the file no longer reaches so far.
/// Thread-safe.
template <class S>
concept file_source = std::movable<S> &&
    requires(const S& source, const std::filesystem::path& path, std::uint64_t offset,
             std::span<std::byte> out) {
  { S::open(path) } -> std::same_as<S>;
  { source.size() }
  noexcept->std::same_as<std::uint64_t>;
  { source.read_at(offset, out) } -> std::same_as<std::error_code>;
};

/// @brief A file_source whose reads may need room beyond the bytes that are there: an aligned read
/// of a file's end asks for a whole block.
/// - `read_padded(offset, out, needed)`: fills the first `needed` bytes of `out`; the others are
/// left with any value. The file reached to offset + needed when it was opened.
template <class S>
concept padded_file_source = file_source<S> &&
    requires(const S& source, std::uint64_t offset, std::span<std::byte> out, std::size_t needed) {
  { source.read_padded(offset, out, needed) } -> std::same_as<std::error_code>;
};

/// @brief Reads a block's image out of the files that its BlockMap names. The files stay open for
/// the reader's life, so a file that is renamed, replaced or deleted goes on being read as it was.
/// Image bytes beyond the end of a file, which rounding outwards can reach, are zeros.
template <file_source Source>
class ExtentReader {
 public:
  /// @throws StorageError if a file cannot be opened, or ends before bytes that a block needs.
  explicit ExtentReader(BlockMap map) : map_{std::move(map)} {
    sources_.reserve(map_.files().size());
    for (const std::filesystem::path& path : map_.files()) sources_.push_back(Source::open(path));
    for (const BlockSource& block : map_.blocks()) check_sizes(block);
  }
  /// @param sources  of the map's files, in their order.
  /// @throws StorageError if a file ends before bytes that a block needs.
  ExtentReader(BlockMap map, std::vector<Source> sources)
      : map_{std::move(map)}, sources_{std::move(sources)} {
    expects(sources_.size() == map_.files().size(), "there is one source per file");
    for (const BlockSource& block : map_.blocks()) check_sizes(block);
  }

  [[nodiscard]] std::size_t block_count() const noexcept { return map_.blocks().size(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return map_.blocks()[index_of(block)].image;
  }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return map_.locate(block, image_offset);
  }
  [[nodiscard]] const BlockMap& block_map() const noexcept { return map_; }
  [[nodiscard]] std::span<const Source> sources() const noexcept { return sources_; }

  /// @brief Fills `out` with image bytes [range). @pre range within the image.
  std::error_code read(BlockId block, ByteRange range, std::span<std::byte> out) const {
    const std::vector<Extent>& extents = map_.blocks()[index_of(block)].extents;
    std::uint64_t at = range.offset;
    while (!out.empty()) {
      const Extent* extent = extent_at(extents, at);
      if (extent == nullptr) return std::make_error_code(std::errc::invalid_argument);
      const std::uint64_t skipped = at - extent->image_offset;
      const auto count = static_cast<std::size_t>(
          std::min<std::uint64_t>(out.size(), extent->byte_count - skipped));
      const std::error_code error =
          read_file(sources_[extent->file], extent->file_offset + skipped, out.first(count));
      if (error) return error;
      out = out.subspan(count);
      at += count;
    }
    return {};
  }

 private:
  static std::error_code read_file(const Source& source, std::uint64_t offset,
                                   std::span<std::byte> out) {
    const std::uint64_t there = source.size() > offset ? source.size() - offset : 0;
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), there));
    std::error_code error;
    if constexpr (padded_file_source<Source>) {
      if (count != 0) error = source.read_padded(offset, out, count);
    } else if (count != 0) {
      error = source.read_at(offset, out.first(count));
    }
    if (!error) std::ranges::fill(out.subspan(count), std::byte{0});
    return error;
  }

  void check_sizes(const BlockSource& block) const {
    for (const Segment& segment : block.image.segments) {
      const std::uint64_t segment_end = segment.image_offset + segment.byte_count;
      for (const Extent& extent : block.extents) {
        const std::uint64_t begin = std::max(segment.image_offset, extent.image_offset);
        const std::uint64_t end = std::min(segment_end, extent.image_offset + extent.byte_count);
        if (begin < end) check_size(extent, extent.file_offset + (end - extent.image_offset));
      }
    }
  }
  void check_size(const Extent& extent, std::uint64_t needed) const {
    const std::uint64_t size = sources_[extent.file].size();
    if (size >= needed) return;
    throw StorageError{map_.files()[extent.file].string(),
                       "has " + std::to_string(size) + " bytes, weights reach to byte " +
                           std::to_string(needed) + ": it shrank or was replaced"};
  }

  BlockMap map_;
  std::vector<Source> sources_;
};

}  // namespace block_streamer::inline v1
