// SPDX-License-Identifier: Apache-2.0
// A tiny model as its files came, with checksums beside it or packed into shards.
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/image_sums.hpp>
#include <block_streamer/checkpoint/shard_conversion.hpp>

#include <support/safetensors_files.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace support {

[[nodiscard]] inline std::vector<block_streamer::BlockTensors> decoder_blocks(
    const TinyModel& model) {
  std::vector<block_streamer::BlockTensors> blocks;
  for (std::uint64_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    blocks.push_back({prefix, {}});
    for (const RawTensor& tensor : layer_tensors(model, layer)) {
      blocks.back().names.push_back(tensor.name.substr(prefix.size()));
    }
  }
  return blocks;
}

/// The tensors of a model with tied embeddings that are in no block.
[[nodiscard]] inline std::vector<std::string> resident_tensors() {
  return {"model.embed_tokens.weight", "model.norm.weight"};
}

/// What a tier would put into the slot of a block; padding 0.
[[nodiscard]] inline std::string fill_slot(const block_streamer::BlockMap& map, std::size_t block) {
  const block_streamer::BlockSource& source = map.blocks()[block];
  std::string image(source.image.byte_count, '\0');
  for (const block_streamer::Extent& extent : source.extents) {
    const std::string file = read_text(map.files()[extent.file]);
    const std::string piece = file.substr(extent.file_offset, extent.byte_count);
    image.replace(extent.image_offset, piece.size(), piece);
  }
  std::string slot(source.image.layout.slot_byte_count[0], '\0');
  for (const block_streamer::Segment& s : source.image.segments) {
    slot.replace(s.slot_offset, s.byte_count, image, s.image_offset, s.byte_count);
  }
  return slot;
}

/// The files of a folder and what they hold.
[[nodiscard]] inline std::map<std::string, std::string> folder_contents(
    const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator{folder}) {
    files.emplace(entry.path().filename().string(), read_text(entry.path()));
  }
  return files;
}

/// A tiny model in `source`, and what converting it needs.
struct Conversion {
  explicit Conversion(TinyModel m = {}, std::size_t files = 2) : model{std::move(m)} {
    write_tiny_model(source, model, files);
    write_text(source / "tokenizer.json", "{\"a\": 1}");
    write_text(source / "weights.bin", "no");
    checkpoint.emplace(block_streamer::Checkpoint::open(source));
    blocks = decoder_blocks(model);
  }
  block_streamer::ConversionReport convert(const std::filesystem::path& to,
                                           const block_streamer::ConversionOptions& options = {}) {
    return block_streamer::convert_to_shards(*checkpoint, blocks, resident_tensors(), to,
                                             shard_options, options);
  }

  TempFolder folder;
  std::filesystem::path source = folder / "original";
  std::filesystem::path packed = folder / "packed";
  TinyModel model;
  std::optional<block_streamer::Checkpoint> checkpoint;
  std::vector<block_streamer::BlockTensors> blocks;
  block_streamer::ShardOptions shard_options{12 << 10, {}};  // a block or two a file
};

}  // namespace support
