// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <storage/tier_conformance.hpp>

#include <algorithm>
#include <utility>

namespace block_streamer::testing_support {

/// The shortest tier there is: a reader over images in memory.
class PatternReader {
 public:
  explicit PatternReader(Images images, std::uint32_t granularity = 1)
      : images_{std::move(images)} {
    for (const Bytes& image : images_) table_.push_back(plain_image(image.size(), granularity));
  }
  [[nodiscard]] std::size_t block_count() const noexcept { return table_.size(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return table_[index_of(block)];
  }
  std::error_code read(BlockId block, ByteRange range, std::span<std::byte> out) {
    std::copy_n(images_[index_of(block)].begin() + static_cast<std::ptrdiff_t>(range.offset),
                out.size(), out.begin());
    return {};
  }

 private:
  Images images_;
  std::vector<BlockImage> table_;
};

}  // namespace block_streamer::testing_support
