// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/block_image.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// A copy out of a chunk into the slot.
struct CopyPiece {
  std::uint64_t chunk_offset = 0;
  std::uint64_t slot_offset = 0;
  std::uint64_t byte_count = 0;
  friend bool operator==(const CopyPiece&, const CopyPiece&) = default;
};

/// One read of a tier, and where its bytes go.
struct Chunk {
  ByteRange image;
  std::uint32_t first_piece = 0;
  std::uint32_t piece_count = 0;
};

/// How one part of a block is read, chunk by chunk in image order. Built once.
struct ReadPlan {
  std::vector<Chunk> chunks;
  std::vector<CopyPiece> pieces;
  std::uint64_t read_byte_count = 0;    ///< what the chunks read, over-read included
  std::uint64_t needed_byte_count = 0;  ///< what reaches the slot
  bool in_memory = false;               ///< nothing is read: copied from the tier's memory, at once

  [[nodiscard]] std::span<const CopyPiece> pieces_of(const Chunk& chunk) const noexcept {
    return std::span{pieces}.subspan(chunk.first_piece, chunk.piece_count);
  }
};

namespace detail {

inline std::span<const Segment> segments_of(const BlockImage& image, std::uint32_t part) {
  expects(part < image.part_count(), "the block has no such part");
  return std::span{image.segments}.subspan(image.part_begin[part],
                                           image.part_begin[part + 1] - image.part_begin[part]);
}

inline void add_chunk(ReadPlan& plan, ByteRange range, std::span<const Segment> segments) {
  Chunk chunk{range, static_cast<std::uint32_t>(plan.pieces.size()), 0};
  for (const Segment& segment : segments) {
    const std::uint64_t begin = std::max(segment.image_offset, range.offset);
    const std::uint64_t end = std::min(segment.image_offset + segment.byte_count, range.end());
    if (begin >= end) continue;
    plan.pieces.push_back(
        {begin - range.offset, segment.slot_offset + (begin - segment.image_offset), end - begin});
    plan.needed_byte_count += end - begin;
  }
  chunk.piece_count = static_cast<std::uint32_t>(plan.pieces.size()) - chunk.first_piece;
  plan.read_byte_count += range.byte_count;
  plan.chunks.push_back(chunk);
}

/// The image ranges that hold the segments, rounded outwards; ranges less than `gap` apart become
/// one.
inline std::vector<ByteRange> covering_ranges(const BlockImage& image,
                                              std::span<const Segment> segments,
                                              std::uint64_t gap) {
  std::vector<ByteRange> ranges;
  for (const Segment& segment : segments) {
    const std::uint64_t begin = round_down(segment.image_offset, image.read_granularity);
    const std::uint64_t end =
        std::min(round_up(segment.image_offset + segment.byte_count, image.read_granularity),
                 image.byte_count);
    if (!ranges.empty() && begin < ranges.back().end() + gap) {
      ranges.back().byte_count = std::max(ranges.back().end(), end) - ranges.back().offset;
    } else {
      ranges.push_back({begin, end - begin});
    }
  }
  return ranges;
}

}  // namespace detail

/// @brief Reads of at most `chunk_byte_count` that cover a part's image, for staging. Gaps between
/// segments that are narrower than a chunk are read over, wider ones are skipped.
/// @pre chunk_byte_count > 0; it is rounded up to the image's read granularity.
[[nodiscard]] inline ReadPlan plan_staged_reads(const BlockImage& image, std::uint32_t part,
                                                std::uint64_t chunk_byte_count) {
  expects(chunk_byte_count > 0, "a chunk has at least one byte");
  const std::uint64_t step =
      round_up(std::min(chunk_byte_count, std::max<std::uint64_t>(image.byte_count, 1)),
               image.read_granularity);
  const auto segments = detail::segments_of(image, part);
  ReadPlan plan;
  for (const ByteRange range : detail::covering_ranges(image, segments, step)) {
    for (std::uint64_t at = range.offset; at < range.end(); at += step) {
      detail::add_chunk(plan, {at, std::min(step, range.end() - at)}, segments);
    }
  }
  return plan;
}

/// @brief Reads that land in the slot itself: each within one segment, at most `chunk_byte_count`
/// long.
/// @pre the image can be read at any alignment (read_granularity 1).
[[nodiscard]] inline ReadPlan plan_direct_reads(const BlockImage& image, std::uint32_t part,
                                                std::uint64_t chunk_byte_count) {
  expects(chunk_byte_count > 0, "a chunk has at least one byte");
  expects(image.read_granularity == 1, "only an image readable at any alignment is read in place");
  chunk_byte_count = std::min(chunk_byte_count, std::max<std::uint64_t>(image.byte_count, 1));
  ReadPlan plan;
  for (const Segment& segment : detail::segments_of(image, part)) {
    const std::uint64_t end = segment.image_offset + segment.byte_count;
    for (std::uint64_t at = segment.image_offset; at < end; at += chunk_byte_count) {
      detail::add_chunk(plan, {at, std::min(chunk_byte_count, end - at)}, {&segment, 1});
    }
  }
  return plan;
}

/// @brief The copies of a part whose image is in page-locked memory: one per segment.
[[nodiscard]] inline ReadPlan plan_memory_copies(const BlockImage& image, std::uint32_t part) {
  ReadPlan plan;
  for (const Segment& segment : detail::segments_of(image, part)) {
    detail::add_chunk(plan, {segment.image_offset, segment.byte_count}, {&segment, 1});
  }
  plan.read_byte_count = 0;
  plan.in_memory = true;
  return plan;
}

}  // namespace block_streamer::inline v1
