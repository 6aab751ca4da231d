// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/extents.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// Moves the segments of an image from `before` to `after`, whose extents cover those of `before`.
/// A segment may span extents that were neighbours in the image and no longer are.
[[nodiscard]] inline std::vector<Segment> moved_segments(std::span<const Segment> segments,
                                                         std::span<const Extent> before,
                                                         std::span<const Extent> after) {
  std::vector<Segment> moved;
  for (Segment left : segments) {
    while (left.byte_count != 0) {
      const Extent* from = extent_at(before, left.image_offset);
      expects(from != nullptr, "the segments of a block lie within its extents");
      const std::uint64_t skipped = left.image_offset - from->image_offset;
      const std::uint64_t in_file = from->file_offset + skipped;
      const std::uint64_t count = std::min(left.byte_count, from->byte_count - skipped);
      const Extent* to = after.data();
      while (to->file != from->file || to->file_offset + to->byte_count <= in_file) ++to;
      moved.push_back({to->image_offset + (in_file - to->file_offset), left.slot_offset, count});
      left = {left.image_offset + count, left.slot_offset + count, left.byte_count - count};
    }
  }
  return moved;
}

[[nodiscard]] inline BlockSource aligned_source(const BlockSource& source,
                                                std::uint32_t granularity) {
  std::vector<FileRange> ranges;
  for (const Extent& e : source.extents) {
    ranges.push_back({e.file, {e.file_offset, e.byte_count}});
  }
  BlockSource aligned{source.image, make_extents(ranges, granularity)};
  BlockImage& image = aligned.image;
  image.read_granularity = granularity;
  image.byte_count = 0;
  if (!aligned.extents.empty()) {
    image.byte_count = aligned.extents.back().image_offset + aligned.extents.back().byte_count;
  }
  image.segments.clear();
  image.part_begin.assign(1, 0);
  for (std::uint32_t part = 0; part < source.image.part_count(); ++part) {
    const std::uint32_t begin = source.image.part_begin[part];
    const std::uint32_t end = source.image.part_begin[part + 1];
    for (const Segment& s :
         moved_segments(std::span{source.image.segments}.subspan(begin, end - begin),
                        source.extents, aligned.extents)) {
      image.segments.push_back(s);
    }
    image.part_begin.push_back(static_cast<std::uint32_t>(image.segments.size()));
  }
  return aligned;
}

}  // namespace detail

/// @brief The same blocks, read at multiples of `granularity`: extents rounded outwards, joined
/// where they then touch. Slots keep their layout. A map whose granularity is such a multiple
/// already is returned as it is.
/// @pre granularity >= 1; the extents of each block are in file order, as make_block_map() leaves
/// them. **Cost.** Linear in extents and segments, squared for blocks of many separate ranges.
[[nodiscard]] inline BlockMap aligned_block_map(BlockMap map, std::uint32_t granularity) {
  expects(granularity >= 1, "read_granularity is at least 1");
  const auto fits = [granularity](const BlockSource& source) {
    return source.image.read_granularity % granularity == 0;
  };
  if (std::ranges::all_of(map.blocks(), fits)) return map;
  std::vector<BlockSource> sources;
  for (const BlockSource& source : map.blocks()) {
    sources.push_back(fits(source) ? source : detail::aligned_source(source, granularity));
  }
  return {std::move(sources), {map.files().begin(), map.files().end()}, map.prefixes()};
}

}  // namespace block_streamer::inline v1
