// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Sums a stream of bytes, as a whole and in chunks.
class RangeSummer {
 public:
  explicit RangeSummer(std::uint64_t chunk_byte_count) : chunk_byte_count_{chunk_byte_count} {
    expects(chunk_byte_count > 0, "a chunk has at least one byte");
  }

  void append(std::span<const std::byte> bytes) {
    crc_ = crc32c(bytes, crc_);
    while (!bytes.empty()) {
      const std::uint64_t in_chunk = byte_count_ % chunk_byte_count_;
      if (in_chunk == 0) chunks_.push_back(0);
      const auto piece = bytes.first(static_cast<std::size_t>(
          std::min<std::uint64_t>(bytes.size(), chunk_byte_count_ - in_chunk)));
      chunks_.back() = crc32c(piece, chunks_.back());
      byte_count_ += piece.size();
      bytes = bytes.subspan(piece.size());
    }
  }
  /// @brief Writes size and sums of what was appended into `range`.
  void finish(SummedRange& range) && {
    range.byte_count = byte_count_;
    range.crc32c = crc_;
    range.chunks = std::move(chunks_);
  }

 private:
  std::uint64_t chunk_byte_count_;
  std::uint64_t byte_count_ = 0;
  std::uint32_t crc_ = 0;
  std::vector<std::uint32_t> chunks_;
};

}  // namespace block_streamer::inline v1
