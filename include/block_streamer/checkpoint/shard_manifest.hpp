// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/extents.hpp>
#include <block_streamer/core/byte_range.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// Where the manifest lies in a checkpoint's folder.
inline constexpr std::string_view manifest_file_name = "block_streamer.json";
/// The newest version of the format that this library reads, and the one that it writes.
inline constexpr std::uint64_t manifest_version = 1;
/// Bytes of one chunk, the unit in which reads are verified.
inline constexpr std::uint64_t checksum_chunk_byte_count = std::uint64_t{64} << 10;
/// Where a packed block begins in its file: a multiple of what any drive reads at once.
inline constexpr std::uint64_t packed_alignment = 4096;

/// What the weights' files are.
enum class ShardLayout : std::uint8_t {
  original,  ///< a checkpoint as it came; the manifest only adds checksums
  packed,    ///< written by the converter: each block contiguous, as it lies in a slot
};

/// A file, as it was when it was summed.
struct SummedFile {
  std::string name;  ///< in the manifest's folder
  std::uint64_t byte_count = 0;
  std::optional<std::uint32_t> crc32c;  ///< of all of it
};

/// The bytes of one block, or of one resident tensor, with their CRC-32C. The bytes of all extents,
/// one after another, are its stream; chunks are cut from the stream.
struct SummedRange {
  std::string name;  ///< of a block its prefix, "model.layers.7."; else the tensor's full name
  std::vector<FileRange> extents;     ///< ascending by (file, offset), none empty
  std::uint64_t byte_count = 0;       ///< of all extents
  std::uint32_t crc32c = 0;           ///< of the whole stream
  std::vector<std::uint32_t> chunks;  ///< of each chunk; the last may be shorter
};

/// @brief What block_streamer.json says: how the weights lie, and their checksums.
/// docs/packed_shards.md has the format and what is promised about versions.
struct ShardManifest {
  ShardLayout layout = ShardLayout::original;
  std::uint64_t chunk_byte_count = checksum_chunk_byte_count;
  std::vector<SummedFile> files;      ///< with weights; FileRange::file counts into it
  std::vector<SummedRange> blocks;    ///< in the order of execution
  std::vector<SummedRange> resident;  ///< tensors of the model outside blocks
  std::vector<SummedFile> copied;     ///< configuration and tokenizer; packed only
  std::string plan;                   ///< plan_identity() of the conversion; empty: not known

  /// @brief The range of that name among blocks, or nullptr. **Cost.** Linear.
  [[nodiscard]] const SummedRange* find_block(std::string_view name) const noexcept {
    for (const SummedRange& block : blocks) {
      if (block.name == name) return &block;
    }
    return nullptr;
  }
};

}  // namespace block_streamer::inline v1
