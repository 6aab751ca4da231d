// SPDX-License-Identifier: Apache-2.0
// Blocks of one segment, filled as image_byte() says.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scripted_tier.hpp"

namespace support {

inline void fill_image(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out) {
  for (std::uint64_t i = 0; i < range.byte_count; ++i) {
    out[i] = image_byte(bs::index_of(block), range.offset + i);
  }
}

/// A block of so many bytes in one segment.
[[nodiscard]] inline bs::BlockImage plain_block(std::uint64_t byte_count) {
  bs::BlockImage image;
  image.byte_count = byte_count;
  if (byte_count > 0) image.segments.push_back({0, 0, byte_count});
  image.part_begin = {0, static_cast<std::uint32_t>(image.segments.size())};
  image.layout.slot_byte_count = {byte_count};
  return image;
}
[[nodiscard]] inline std::vector<bs::BlockImage> plain_blocks(
    const std::vector<std::uint64_t>& byte_counts) {
  std::vector<bs::BlockImage> images;
  for (const std::uint64_t n : byte_counts) images.push_back(plain_block(n));
  return images;
}

}  // namespace support
