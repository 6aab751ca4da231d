// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/block_image.hpp>
#include <block_streamer/core/config.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {
using Spans = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // (begin, end)

[[nodiscard]] inline bool any_overlap(Spans spans) {
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return true;
  }
  return false;
}

/// True if [begin, end) lies within the union of `spans`. @pre spans sorted, not overlapping.
[[nodiscard]] inline bool covers(const Spans& spans, std::uint64_t begin, std::uint64_t end) {
  for (const auto& [first, last] : spans) {
    if (first > begin) break;
    begin = std::max(begin, std::min(last, end));
    if (begin == end) return true;
  }
  return begin == end;
}

[[nodiscard]] inline std::optional<std::string> check_part(const BlockImage& image,
                                                           std::uint32_t part) {
  const std::uint64_t slot_size = image.layout.slot_byte_count[part];
  Spans slot;
  std::uint64_t image_end = 0;
  for (std::uint32_t i = image.part_begin[part]; i < image.part_begin[part + 1]; ++i) {
    const Segment& s = image.segments[i];
    const std::string name = "segment " + std::to_string(i);
    if (s.byte_count == 0) return name + " is empty";
    if (s.image_offset < image_end) return name + " overlaps or precedes the one before it";
    if (s.image_offset > image.byte_count || s.byte_count > image.byte_count - s.image_offset) {
      return name + " reaches beyond the image";
    }
    if (s.slot_offset > slot_size || s.byte_count > slot_size - s.slot_offset) {
      return name + " reaches beyond the slot";
    }
    image_end = s.image_offset + s.byte_count;
    slot.emplace_back(s.slot_offset, s.slot_offset + s.byte_count);
  }
  if (any_overlap(slot)) return "two segments write the same slot bytes";
  std::sort(slot.begin(), slot.end());
  Spans places;
  for (const TensorPlacement& t : image.layout.tensors) {
    if (t.part != part) continue;
    if (t.slot_offset > slot_size || t.byte_count > slot_size - t.slot_offset) {
      return "tensor '" + t.spec.name + "' reaches beyond the slot";
    }
    if (t.byte_count == 0) continue;
    places.emplace_back(t.slot_offset, t.slot_offset + t.byte_count);
    if (!covers(slot, places.back().first, places.back().second)) {
      return "tensor '" + t.spec.name + "' is not filled by the segments";
    }
  }
  if (any_overlap(places)) return "two tensors lie on the same slot bytes";
  return std::nullopt;
}
}  // namespace detail

/// @brief Checks that an image is consistent in itself: sizes and offsets in range and aligned,
/// segments sorted, not empty, not overlapping in either space, every tensor filled. For images
/// whose bytes are copied as they are; not for compressed ones.
/// @returns What is wrong first, or nullopt. **Cost.** O(n log n) in segments, O(n²) in tensors.
[[nodiscard]] inline std::optional<std::string> validate(const BlockImage& image) {
  const auto& begins = image.part_begin;
  const BlockLayout& layout = image.layout;
  if (image.read_granularity == 0) return "read_granularity is 0";
  if (image.byte_count % image.read_granularity != 0) {
    return "byte_count is no multiple of read_granularity";
  }
  if (begins.size() < 2 || begins.front() != 0 || begins.back() != image.segments.size() ||
      !std::is_sorted(begins.begin(), begins.end())) {
    return "part_begin does not divide the segments";
  }
  if (layout.slot_byte_count.size() != image.part_count())
    return "slots and parts differ in number";
  for (const TensorPlacement& t : layout.tensors) {
    if (t.part >= image.part_count()) return "tensor '" + t.spec.name + "' is of no part";
    if (t.slot_offset % tensor_alignment != 0) return "tensor '" + t.spec.name + "' is not aligned";
    if (dense_byte_count(t.spec.dtype, t.spec.shape) != t.byte_count) {
      return "tensor '" + t.spec.name + "' has another size than its shape says";
    }
    if (layout.find(t.spec.name) != &t) return "tensor '" + t.spec.name + "' is listed twice";
  }
  for (std::uint32_t part = 0; part < image.part_count(); ++part) {
    if (auto fault = detail::check_part(image, part)) return fault;
  }
  return std::nullopt;
}

}  // namespace block_streamer::inline v1
