// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/block_map.hpp>

#include <block_streamer/checkpoint/block_image_check.hpp>

#include <support/safetensors_files.hpp>

#include <array>
#include <random>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

/// Reads the block as a tier would: extents to an image, segments to a slot. Bytes beyond a file's
/// end and slot padding stay 0xEE.
std::string slot_bytes(const bs::BlockMap& map, std::size_t block) {
  const bs::BlockSource& source = map.blocks()[block];
  std::string image(source.image.byte_count, '\xEE');
  for (const bs::Extent& extent : source.extents) {
    const std::string file = support::read_text(map.files()[extent.file]);
    const std::string piece = file.substr(extent.file_offset, extent.byte_count);
    image.replace(extent.image_offset, piece.size(), piece);
  }
  std::string slot(source.image.layout.slot_byte_count[0], '\xEE');
  for (const bs::Segment& s : source.image.segments) {
    slot.replace(s.slot_offset, s.byte_count, image, s.image_offset, s.byte_count);
  }
  return slot;
}

void check_block(const bs::BlockMap& map, std::size_t block, const std::string& prefix) {
  const bs::BlockImage& image = map.blocks()[block].image;
  INFO(prefix << " " << bs::validate(image).value_or("consistent"));
  REQUIRE_FALSE(bs::validate(image));
  const std::string slot = slot_bytes(map, block);
  for (const bs::TensorPlacement& tensor : image.layout.tensors) {
    INFO(tensor.spec.name);
    CHECK(slot.substr(tensor.slot_offset, tensor.byte_count) ==
          support::pattern_bytes(prefix + tensor.spec.name, tensor.byte_count));
  }
  std::uint64_t end = 0;
  for (const bs::Extent& extent : map.blocks()[block].extents) {
    CHECK(extent.image_offset == end);
    CHECK(extent.file_offset % image.read_granularity == 0);
    CHECK(extent.byte_count % image.read_granularity == 0);
    end += extent.byte_count;
  }
  CHECK(end == image.byte_count);
}

std::vector<bs::BlockTensors> decoder_blocks(const support::TinyModel& model) {
  std::vector<bs::BlockTensors> blocks;
  for (std::uint64_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    blocks.push_back({prefix, {}});
    for (const auto& tensor : support::layer_tensors(model, layer)) {
      blocks.back().names.push_back(tensor.name.substr(prefix.size()));
    }
  }
  return blocks;
}

}  // namespace

TEST_CASE("b01 b03 b04 blocks are exact at any header remainder, granularity and shard count") {
  const std::uint64_t remainder = GENERATE(0, 2, 3, 5);
  const std::size_t shards = GENERATE(1, 2, 5);
  const std::uint32_t granularity = GENERATE(1, 3, 64, 512, 4096);
  const support::TempFolder folder;
  support::TinyModel model;
  model.dtype = remainder == 3 ? "U8" : "BF16";  // odd sizes: nothing is aligned
  support::FileOptions options;
  options.header_remainder = remainder;
  support::write_tiny_model(folder.path(), model, shards, options);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  REQUIRE(checkpoint.files().size() == shards);
  const auto blocks = decoder_blocks(model);
  const auto map = bs::make_block_map(checkpoint, blocks, granularity);
  for (std::size_t i = 0; i < blocks.size(); ++i) check_block(map, i, blocks[i].prefix);
}

TEST_CASE("adjacent ranges are one extent and nothing is read twice or in vain") {
  const support::TempFolder folder;
  support::write_tiny_model(folder.path());
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const auto blocks = decoder_blocks({});
  const auto map = bs::make_block_map(checkpoint, blocks);
  for (const bs::BlockSource& source : map.blocks()) {
    std::uint64_t needed = 0;
    for (const auto& tensor : source.image.layout.tensors) needed += tensor.byte_count;
    CHECK(source.extents.size() == 1);
    CHECK(source.image.byte_count == needed);
  }
}

TEST_CASE("neighbours whose sizes are multiples of 256 are one segment") {
  const support::TempFolder folder;
  const std::array tensors{
      support::raw_tensor("b.a", "U8", {256}), support::raw_tensor("b.b", "F32", {2, 64}),
      support::raw_tensor("b.c", "U8", {100}), support::raw_tensor("b.d", "U8", {256})};
  support::write_safetensors_file(folder / "model.safetensors", tensors);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const std::array blocks{bs::BlockTensors{"b.", {"d", "c", "b", "a"}}};
  const auto map = bs::make_block_map(checkpoint, blocks);
  const bs::BlockImage& image = map.blocks()[0].image;
  CHECK(image.segments == std::vector<bs::Segment>{{0, 0, 868}, {868, 1024, 256}});
  CHECK(image.layout.slot_byte_count[0] == 1280);
  check_block(map, 0, "b.");
}

TEST_CASE("b12 tensors without elements have a place but no segment and no read") {
  const support::TempFolder folder;
  const std::array tensors{
      support::raw_tensor("a.x", "F32", {0}), support::raw_tensor("a.y", "F32", {2, 0}),
      support::raw_tensor("b.x", "U8", {0, 3}), support::raw_tensor("b.y", "U8", {7}),
      support::raw_tensor("b.z", "BF16", {0})};
  support::write_safetensors_file(folder / "model.safetensors", tensors);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const std::array blocks{bs::BlockTensors{"a.", {"x", "y"}},
                          bs::BlockTensors{"b.", {"x", "y", "z"}}, bs::BlockTensors{"none.", {}}};
  const auto map = bs::make_block_map(checkpoint, blocks, 512);
  CHECK(map.blocks()[0].extents.empty());
  CHECK(map.blocks()[0].image.byte_count == 0);
  CHECK(map.blocks()[0].image.segments.empty());
  CHECK(map.blocks()[0].image.layout.tensors.size() == 2);
  CHECK(map.blocks()[1].image.segments.size() == 1);
  for (std::size_t i = 0; i < 3; ++i) check_block(map, i, blocks[i].prefix);
}

TEST_CASE("rounding outwards joins what shares a page and never reads a page twice") {
  const support::TempFolder folder;
  const std::array tensors{
      support::raw_tensor("b.a", "U8", {100}), support::raw_tensor("x", "U8", {300}),
      support::raw_tensor("b.b", "U8", {5000}), support::raw_tensor("y", "U8", {9000}),
      support::raw_tensor("b.c", "U8", {10})};
  support::write_safetensors_file(folder / "model.safetensors", tensors);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const std::array blocks{bs::BlockTensors{"b.", {"a", "b", "c"}}};
  const auto exact = bs::make_block_map(checkpoint, blocks);
  CHECK(exact.blocks()[0].extents.size() == 3);
  CHECK(exact.blocks()[0].image.byte_count == 5110);
  const auto paged = bs::make_block_map(checkpoint, blocks, 4096);
  CHECK(paged.blocks()[0].extents.size() == 2);
  check_block(exact, 0, "b.");
  check_block(paged, 0, "b.");
}

TEST_CASE("locate names file, offset and tensor of any image byte") {
  const support::TempFolder folder;
  support::TinyModel model;
  support::write_tiny_model(folder.path(), model, 5);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const auto map = bs::make_block_map(checkpoint, decoder_blocks(model), 512);
  for (const bs::StoredTensor& tensor : checkpoint.with_prefix("model.layers.1.")) {
    const auto& source = map.blocks()[1];
    for (const bs::Extent& extent : source.extents) {
      const std::uint64_t at = tensor.range.end() - 1;
      if (extent.file != tensor.file || at < extent.file_offset ||
          at >= extent.file_offset + extent.byte_count) {
        continue;
      }
      const std::string text =
          map.locate(bs::block_at(1), extent.image_offset + (at - extent.file_offset));
      CHECK(text == checkpoint.files()[tensor.file].string() + ", offset " + std::to_string(at) +
                        ", tensor " + tensor.spec.name + " (block 1)");
    }
  }
  const bs::BlockImage& rounded = map.blocks()[1].image;
  REQUIRE(rounded.segments.front().image_offset > 0);
  CHECK_THAT(map.locate(bs::block_at(1), 0), ContainsSubstring(", before tensor model.layers.1.") &&
                                                 ContainsSubstring("(block 1)"));
  CHECK(map.locate(bs::block_at(1), 1 << 30) == "block 1, image offset 1073741824");
  CHECK(map.locate(bs::block_at(99), 0).find("does not exist") != std::string::npos);
}

TEST_CASE("a block that cannot be built is refused by name") {
  const support::TempFolder folder;
  support::write_tiny_model(folder.path());
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const std::array missing{bs::BlockTensors{"model.layers.0.", {"self_attn.sinks"}}};
  CHECK_THROWS_WITH(bs::make_block_map(checkpoint, missing),
                    ContainsSubstring("model.layers.0.self_attn.sinks"));
  const std::array twice{
      bs::BlockTensors{"model.layers.0.", {"mlp.up_proj.weight", "mlp.up_proj.weight"}}};
  CHECK_THROWS_AS(bs::make_block_map(checkpoint, twice), bs::ContractViolation);
  CHECK_THROWS_AS(bs::make_block_map(checkpoint, missing, 0), bs::ContractViolation);
}

TEST_CASE("random blocks over random files keep every byte") {
  std::mt19937 random{7};
  for (int round = 0; round < 30; ++round) {
    const support::TempFolder folder;
    std::vector<support::RawTensor> tensors;
    std::vector<bs::BlockTensors> blocks(4);
    for (std::size_t b = 0; b < blocks.size(); ++b) blocks[b].prefix = std::to_string(b) + ".";
    for (int i = 0; i < 40; ++i) {
      const std::size_t b = random() % blocks.size();
      const std::string name = "t" + std::to_string(i);
      tensors.push_back(support::raw_tensor(blocks[b].prefix + name, "U8", {random() % 2000}));
      if (random() % 4 != 0) blocks[b].names.push_back(name);
    }
    const std::size_t cut = random() % tensors.size();
    const std::array<std::vector<support::RawTensor>, 2> shards{
        std::vector(tensors.begin(), tensors.begin() + static_cast<std::ptrdiff_t>(cut)),
        std::vector(tensors.begin() + static_cast<std::ptrdiff_t>(cut), tensors.end())};
    support::write_shards(folder.path(), shards, {{}, 8, random() % 8});
    const auto map = bs::make_block_map(bs::Checkpoint::open(folder.path()), blocks,
                                        std::uint32_t{1} << random() % 11);
    for (std::size_t b = 0; b < blocks.size(); ++b) check_block(map, b, blocks[b].prefix);
  }
}
