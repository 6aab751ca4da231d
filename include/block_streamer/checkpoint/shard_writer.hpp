// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/float_conversion.hpp>
#include <block_streamer/checkpoint/range_summer.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/checkpoint/shard_plan.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What a packed file adds to the manifest. Extents count file 0 as this one.
struct WrittenShard {
  SummedFile file;
  std::vector<SummedRange> blocks;
  std::vector<SummedRange> resident;
};

namespace detail {

/// Writes one packed file, and sums it on the way: what is summed has not been on a disk yet.
class ShardWriter {
 public:
  ShardWriter(const std::filesystem::path& path, std::span<const std::filesystem::path> sources,
              const ByteProgress& progress)
      : file_{path},
        sources_{sources},
        progress_{progress},
        stored_(sum_piece_byte_count),
        converted_(4 * sum_piece_byte_count) {}

  [[nodiscard]] WrittenShard write(const PackedShard& shard) {
    WrittenShard written{{shard.file_name, shard.byte_count, std::nullopt}, {}, {}};
    data_begin_ = shard.header.size();
    append(std::as_bytes(std::span{shard.header}), nullptr);
    for (const PackedGroup& group : shard.groups) {
      pad_to(data_begin_ + group.range.offset, nullptr);
      SummedRange range = write_group(group);
      if (group.kind == PackedGroup::Kind::block)
        written.blocks.push_back(std::move(range));
      else if (group.kind == PackedGroup::Kind::resident)
        written.resident.push_back(std::move(range));
    }
    pad_to(shard.byte_count, nullptr);
    file_.commit();
    written.file.crc32c = crc_;
    return written;
  }

 private:
  void append(std::span<const std::byte> bytes, RangeSummer* summer) {
    file_.append(bytes);
    crc_ = crc32c(bytes, crc_);
    at_ += bytes.size();
    if (summer != nullptr) summer->append(bytes);
  }
  void pad_to(std::uint64_t offset, RangeSummer* summer) {
    static constexpr std::array<std::byte, packed_alignment> zeros{};
    while (at_ < offset) {
      append(std::span{zeros}.first(
                 static_cast<std::size_t>(std::min<std::uint64_t>(zeros.size(), offset - at_))),
             summer);
    }
  }

  [[nodiscard]] SummedRange write_group(const PackedGroup& group) {
    RangeSummer summer{checksum_chunk_byte_count};
    SummedRange range{group.name, {}, 0, 0, {}};
    for (const PackedTensor& tensor : group.tensors) {
      pad_to(data_begin_ + tensor.range.offset, &summer);
      write_tensor(tensor, summer);
    }
    std::move(summer).finish(range);
    if (range.byte_count != 0) {
      range.extents.push_back({0, {data_begin_ + group.range.offset, range.byte_count}});
    }
    return range;
  }

  void write_tensor(const PackedTensor& tensor, RangeSummer& summer) {
    const auto& [file, bytes] = tensor.source;
    if (bytes.byte_count == 0) return;
    read_pieces(sources_[file], bytes, stored_, [&](std::span<const std::byte> piece) {
      if (tensor.to) {
        const auto out = std::span{converted_}.first(piece.size() / byte_count_of(*tensor.from) *
                                                     byte_count_of(*tensor.to));
        convert_floats(*tensor.from, piece, *tensor.to, out);
        append(out, &summer);
      } else {
        append(piece, &summer);
      }
      if (progress_) progress_(piece.size());
    });
  }

  ReplacingFile file_;
  std::span<const std::filesystem::path> sources_;
  const ByteProgress& progress_;
  std::vector<std::byte> stored_;
  std::vector<std::byte> converted_;  ///< f16 to f64 takes four times the bytes
  std::uint64_t data_begin_ = 0;
  std::uint64_t at_ = 0;
  std::uint32_t crc_ = 0;
};

}  // namespace detail

/// @brief Writes one file of a plan into `folder`; it appears there whole and durable, or not at
/// all.
/// @throws StorageError naming the file if reading or writing fails, e.g. because the disk is full.
/// **Cost.** 20 MiB of memory, whatever the sizes.
[[nodiscard]] inline WrittenShard write_shard(const std::filesystem::path& folder,
                                              const PackedShard& shard,
                                              std::span<const std::filesystem::path> sources,
                                              const ByteProgress& progress = {}) {
  return detail::ShardWriter{folder / shard.file_name, sources, progress}.write(shard);
}

}  // namespace block_streamer::inline v1
