// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/block_layout.hpp>

#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

/// A copy from image space (what a tier delivers) to slot space (where tensors lie).
struct Segment {
  std::uint64_t image_offset = 0;
  std::uint64_t slot_offset = 0;  ///< counts from the slot of the segment's part
  std::uint64_t byte_count = 0;
  friend bool operator==(const Segment&, const Segment&) = default;
};

/// @brief One block as a tier delivers it: a virtual byte stream and the table that scatters it
/// into slots. Image space is the block's extents, each rounded outwards to `read_granularity`, one
/// after another. Unaligned checkpoints, packed shards and compressed blocks differ in this table
/// only, never in the pipeline. Plain data, built once, never on the visit path.
struct BlockImage {
  std::uint64_t byte_count = 0;  ///< over-read included: bytes_read is known before the first read
  std::uint32_t read_granularity =
      1;                          ///< offset, size and buffer address of every read are multiples
  std::vector<Segment> segments;  ///< sorted by image_offset, none empty
  std::vector<std::uint32_t> part_begin{
      0, 0};           ///< segments of part p are [part_begin[p], part_begin[p+1])
  BlockLayout layout;  ///< names, types and places; carried so that decorators keep them

  [[nodiscard]] std::size_t part_count() const noexcept { return part_begin.size() - 1; }
};

}  // namespace block_streamer::inline v1
