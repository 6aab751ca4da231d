// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Chunks [first, end) of a block.
struct ChunkRange {
  std::size_t first = 0;
  std::size_t end = 0;
};

/// @brief The checksums of one block, brought into its image: which image bytes each summed chunk
/// has. The image may be rounded to any read granularity; what rounding adds is in no chunk.
/// **Threads.** Immutable.
class ImageSums {
 public:
  /// @throws FormatError naming the block if the manifest does not sum all bytes of it.
  ImageSums(const BlockSource& source, const SummedRange& range,
            std::span<const std::uint32_t> file_in_map, std::uint64_t chunk_byte_count,
            const std::string& manifest)
      : chunks_{range.chunks},
        chunk_byte_count_{chunk_byte_count},
        stream_byte_count_{range.byte_count} {
    std::uint64_t stream = 0;
    for (const auto& [file, bytes] : range.extents) {
      for (const Extent& extent : source.extents) {
        if (extent.file != file_in_map[file]) continue;
        const std::uint64_t begin = std::max(bytes.offset, extent.file_offset);
        const std::uint64_t end = std::min(bytes.end(), extent.file_offset + extent.byte_count);
        if (begin >= end) continue;
        runs_.push_back({extent.image_offset + (begin - extent.file_offset),
                         stream + (begin - bytes.offset), end - begin});
      }
      stream += bytes.byte_count;
    }
    if (!ascending() || !covers(source.image)) {
      throw FormatError{manifest, "the checksums of '" + range.name +
                                      "' are not those of this model's block; make them again"};
    }
  }

  /// @brief The chunks that have a byte in that part of the image.
  [[nodiscard]] ChunkRange chunks_in(ByteRange image) const noexcept {
    ChunkRange chunks{chunks_.size(), 0};
    for (const Run& run : runs_) {
      const std::uint64_t begin = std::max(run.image_offset, image.offset);
      const std::uint64_t end = std::min(run.image_offset + run.byte_count, image.end());
      if (begin >= end) continue;
      const std::uint64_t shift = run.stream_offset - run.image_offset;  // modulo 2^64
      chunks.first = std::min<std::size_t>(chunks.first, (begin + shift) / chunk_byte_count_);
      chunks.end = std::max<std::size_t>(chunks.end, (end - 1 + shift) / chunk_byte_count_ + 1);
    }
    chunks.first = std::min(chunks.first, chunks.end);
    return chunks;
  }
  /// @brief From the first to the last image byte of a chunk.
  [[nodiscard]] ByteRange cover(std::size_t chunk) const noexcept {
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    bool begun = false;
    for_each_piece(chunk, [&](ByteRange image) {
      if (!begun) first = image.offset;
      begun = true;
      last = image.end();
    });
    return {first, last - first};
  }
  /// @brief The sum of a chunk's bytes as they are in `bytes`, whose first is image byte `begin`.
  /// @pre they contain cover(chunk).
  [[nodiscard]] std::uint32_t sum(std::size_t chunk, std::uint64_t begin,
                                  std::span<const std::byte> bytes) const noexcept {
    std::uint32_t crc = 0;
    for_each_piece(chunk, [&](ByteRange image) {
      crc = crc32c(bytes.subspan(static_cast<std::size_t>(image.offset - begin),
                                 static_cast<std::size_t>(image.byte_count)),
                   crc);
    });
    return crc;
  }
  /// @brief What sum() should be.
  [[nodiscard]] std::uint32_t expected(std::size_t chunk) const noexcept { return chunks_[chunk]; }
  /// @brief Where the chunk begins among the block's summed bytes.
  [[nodiscard]] std::uint64_t offset(std::size_t chunk) const noexcept {
    return chunk * chunk_byte_count_;
  }
  [[nodiscard]] std::size_t chunk_count() const noexcept { return chunks_.size(); }

 private:
  /// Bytes that are contiguous in both.
  struct Run {
    std::uint64_t image_offset = 0;
    std::uint64_t stream_offset = 0;
    std::uint64_t byte_count = 0;
  };

  /// Calls `use` with the image ranges of a chunk, in the order of its bytes.
  template <class Use>
  void for_each_piece(std::size_t chunk, Use&& use) const {
    const std::uint64_t begin = offset(chunk);
    const std::uint64_t end = std::min(begin + chunk_byte_count_, stream_byte_count_);
    for (const Run& run : runs_) {
      const std::uint64_t from = std::max(run.stream_offset, begin);
      const std::uint64_t to = std::min(run.stream_offset + run.byte_count, end);
      if (from < to) use(ByteRange{run.image_offset + (from - run.stream_offset), to - from});
    }
  }
  /// In both spaces, and nothing of the stream is missing.
  [[nodiscard]] bool ascending() const noexcept {
    std::uint64_t image = 0;
    std::uint64_t stream = 0;
    for (const Run& run : runs_) {
      if (run.image_offset < image || run.stream_offset != stream) return false;
      image = run.image_offset + run.byte_count;
      stream += run.byte_count;
    }
    return stream == stream_byte_count_;
  }
  /// Whether every byte that reaches a slot is in a run.
  [[nodiscard]] bool covers(const BlockImage& image) const noexcept {
    return std::all_of(image.segments.begin(), image.segments.end(), [&](const Segment& segment) {
      std::uint64_t at = segment.image_offset;
      for (const Run& run : runs_) {
        if (run.image_offset <= at) at = std::max(at, run.image_offset + run.byte_count);
      }
      return at >= segment.image_offset + segment.byte_count;
    });
  }

  std::vector<Run> runs_;
  std::vector<std::uint32_t> chunks_;
  std::uint64_t chunk_byte_count_;
  std::uint64_t stream_byte_count_;
};

/// @brief The sums of every block of a map, by BlockId.
/// @param manifest_path  for messages.
/// @throws FormatError naming the block if the manifest has no sums of it, or not of all its bytes.
[[nodiscard]] inline std::vector<ImageSums> make_image_sums(const BlockMap& map,
                                                            const ShardManifest& manifest,
                                                            const std::string& manifest_path) {
  constexpr std::uint32_t elsewhere = ~std::uint32_t{0};
  std::vector<std::uint32_t> file_in_map(manifest.files.size(), elsewhere);
  for (std::size_t i = 0; i < file_in_map.size(); ++i) {
    for (std::size_t j = 0; j < map.files().size(); ++j) {
      if (map.files()[j].filename() == manifest.files[i].name) {
        file_in_map[i] = static_cast<std::uint32_t>(j);
      }
    }
  }
  std::vector<ImageSums> sums;
  for (std::size_t i = 0; i < map.blocks().size(); ++i) {
    const SummedRange* range = manifest.find_block(map.prefixes()[i]);
    if (range == nullptr) {
      throw FormatError{manifest_path,
                        "there are no checksums of '" + map.prefixes()[i] + "'; make them again"};
    }
    sums.emplace_back(map.blocks()[i], *range, file_in_map, manifest.chunk_byte_count,
                      manifest_path);
  }
  return sums;
}

}  // namespace block_streamer::inline v1
