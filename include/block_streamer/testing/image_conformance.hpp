// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/block_image.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/testing/conformance.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::testing {

namespace detail {

[[nodiscard]] inline bool parts_fit(const BlockImage& image) {
  return image.part_begin.size() >= 2 && image.part_begin.front() == 0 &&
         image.part_begin.back() == image.segments.size() &&
         std::ranges::is_sorted(image.part_begin) &&
         image.layout.slot_byte_count.size() == image.part_count();
}

/// Slot ranges of one part, none of which may meet another.
[[nodiscard]] inline bool slots_fit(const BlockImage& image, std::size_t part) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (std::uint32_t s = image.part_begin[part]; s < image.part_begin[part + 1]; ++s) {
    const Segment& segment = image.segments[s];
    ranges.emplace_back(segment.slot_offset, segment.slot_offset + segment.byte_count);
  }
  std::ranges::sort(ranges);
  std::uint64_t end = 0;
  for (const auto& [from, to] : ranges) {
    if (from < end || to < from) return false;
    end = to;
  }
  return end <= image.layout.slot_byte_count[part];
}

}  // namespace detail

/// @brief Checks that a block's segment table is one that the pipeline can follow.
inline bool check_image(const BlockImage& image, BlockId block, Checks& checks) {
  const auto name = [&] { return to_string(PartId{block}); };
  bool good =
      checks.expect(image.read_granularity > 0 && image.byte_count % image.read_granularity == 0,
                    "an image is a whole number of read granules", name);
  std::uint64_t end = 0;
  bool sorted = true;
  for (const Segment& segment : image.segments) {
    sorted = sorted && segment.byte_count > 0 && segment.image_offset >= end &&
             segment.byte_count <= image.byte_count &&
             segment.image_offset <= image.byte_count - segment.byte_count;
    end = segment.image_offset + segment.byte_count;
  }
  good &= checks.expect(sorted, "segments are sorted, disjoint, not empty and in the image", name);
  if (!checks.expect(detail::parts_fit(image), "part_begin and slot sizes cover all segments",
                     name)) {
    return false;
  }
  for (std::size_t part = 0; part < image.part_count(); ++part) {
    good &= checks.expect(detail::slots_fit(image, part),
                          "segments do not meet in the slot and end within it", name);
  }
  return good;
}

}  // namespace block_streamer::inline v1::testing
