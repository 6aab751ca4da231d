// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// One contiguous piece of a file, at its place in a block's image. Offsets and size are multiples
/// of the image's read granularity; the last piece of a file may therefore reach beyond its end,
/// where image bytes have no defined value and belong to no segment.
struct Extent {
  std::uint32_t file = 0;
  std::uint64_t file_offset = 0;
  std::uint64_t byte_count = 0;
  std::uint64_t image_offset = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// A range of a file that a block needs.
struct FileRange {
  std::uint32_t file = 0;
  ByteRange range;
};

/// @brief The extents that cover `ranges`: each rounded outwards to `granularity`, joined where
/// they then touch or overlap, and laid end to end in image space. Bytes between ranges are read
/// only where rounding reaches them.
/// @pre ranges sorted by (file, offset), none empty, none overlapping; granularity >= 1.
/// **Cost.** Linear.
[[nodiscard]] inline std::vector<Extent> make_extents(std::span<const FileRange> ranges,
                                                      std::uint32_t granularity) {
  std::vector<Extent> extents;
  for (const auto& [file, range] : ranges) {
    const std::uint64_t begin = round_down(range.offset, granularity);
    const std::uint64_t end = round_up(range.end(), granularity);
    if (!extents.empty() && extents.back().file == file &&
        extents.back().file_offset + extents.back().byte_count >= begin) {
      Extent& last = extents.back();
      last.byte_count = end - last.file_offset;  // sorted ranges end in order
    } else {
      const std::uint64_t image_offset =
          extents.empty() ? 0 : extents.back().image_offset + extents.back().byte_count;
      extents.push_back({file, begin, end - begin, image_offset});
    }
  }
  return extents;
}

/// @brief The extent that holds image byte `image_offset`, or nullptr beyond the last.
/// **Cost.** O(log n).
[[nodiscard]] inline const Extent* extent_at(std::span<const Extent> extents,
                                             std::uint64_t image_offset) noexcept {
  const auto after = std::upper_bound(
      extents.begin(), extents.end(), image_offset,
      [](std::uint64_t offset, const Extent& extent) { return offset < extent.image_offset; });
  if (after == extents.begin()) return nullptr;
  const Extent& extent = *std::prev(after);
  return image_offset - extent.image_offset < extent.byte_count ? &extent : nullptr;
}

}  // namespace block_streamer::inline v1
