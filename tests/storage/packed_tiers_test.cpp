// SPDX-License-Identifier: Apache-2.0
// A model as its files came and packed, through every tier, verified and not.
#include <block_streamer/checkpoint/aligned_block_map.hpp>
#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/storage/decorators/verified_storage.hpp>

#include <storage/every_tier.hpp>
#include <support/catch.hpp>
#include <support/packed_model.hpp>

#include <filesystem>
#include <optional>
#include <string>

namespace bs = block_streamer;
namespace fs = std::filesystem;
using namespace bs::testing_support;

namespace {

/// One folder: what streams of it, and its sums.
struct Folder {
  explicit Folder(const fs::path& path, const std::vector<bs::BlockTensors>& blocks)
      : checkpoint{bs::Checkpoint::open(path)},
        map{bs::aligned_block_map(bs::make_block_map(checkpoint, blocks), 4096)} {
    REQUIRE(checkpoint.manifest() != nullptr);
    sums = bs::make_image_sums(map, *checkpoint.manifest(), path.string());
    for (std::size_t b = 0; b < blocks.size(); ++b) slots.push_back(support::fill_slot(map, b));
  }
  [[nodiscard]] bs::AnyStorage verified(const TierOverFiles& tier) const {
    return bs::VerifiedStorage{tier.make(map), sums};
  }
  /// Changes a byte of the block's first tensor, or changes it back.
  void flip(std::size_t block) const {
    const bs::BlockSource& source = map.blocks()[block];
    const bs::Segment& first = source.image.segments.front();
    const bs::Extent& extent = source.extents.front();
    const fs::path& file = map.files()[extent.file];
    std::fstream bytes{file, std::ios::binary | std::ios::in | std::ios::out};
    const auto at = static_cast<std::streamoff>(extent.file_offset + first.image_offset);
    bytes.seekg(at);
    const auto byte = static_cast<char>(bytes.get());
    bytes.seekp(at);
    bytes.put(static_cast<char>(byte ^ 16));
    REQUIRE(bytes.good());
  }
  /// @returns how many tensors have other bytes than their files had when this was made.
  std::size_t stream(Streamed& streamed) const {
    return streamed.pass([this](std::span<const std::byte> slot, std::size_t b) {
      std::size_t wrong = 0;
      for (const bs::Segment& s : map.blocks()[b].image.segments) {
        const auto expected = std::as_bytes(std::span{slots[b]});
        wrong += std::ranges::equal(slot.subspan(s.slot_offset, s.byte_count),
                                    expected.subspan(s.slot_offset, s.byte_count))
                     ? 0
                     : 1;
      }
      return wrong;
    });
  }

  bs::Checkpoint checkpoint;
  bs::BlockMap map;
  std::vector<bs::ImageSums> sums;
  std::vector<std::string> slots;
};

/// The same model twice; blocks of the original straddle its files.
struct Model {
  Model() {
    const fs::path original = folder / "original", packed = folder / "packed";
    support::TinyModel model;
    model.hidden = 48;
    model.intermediate = 1200;  // blocks of several chunks of sums
    support::write_tiny_model(original, model, 3);
    const auto blocks = support::decoder_blocks(model);
    const auto plain = bs::Checkpoint::open(original);
    const auto resident = support::resident_tensors();
    bs::convert_to_shards(plain, blocks, resident, packed, {64 << 10, {}}, {});
    const auto manifest = bs::sum_checkpoint(plain, blocks, resident);
    support::write_text(original / bs::manifest_file_name, bs::format_shard_manifest(manifest));
    folders.emplace_back(original, blocks);
    folders.emplace_back(packed, blocks);
  }
  support::TempFolder folder;
  std::vector<Folder> folders;
};

}  // namespace

TEST_CASE("original and packed models have the same slots through every tier, verified or not") {
  const Model model;
  CHECK(model.folders[0].slots == model.folders[1].slots);
  for (const Folder& folder : model.folders) {
    for (const TierOverFiles& tier : every_tier()) {
      INFO(tier.name);
      Streamed plain{tier.make(folder.map)};
      Streamed verified{folder.verified(tier)};
      for (int pass = 0; pass < 2; ++pass) {
        CHECK(folder.stream(plain) == 0);
        CHECK(folder.stream(verified) == 0);
      }
    }
  }
}

TEST_CASE(
    "bytes written over in place while a model streams are found by sums, and by nothing else") {
  const Model model;
  constexpr std::size_t changed = 1;  // a block that no tier but RAM keeps
  for (const Folder& folder : model.folders) {
    for (const TierOverFiles& tier : every_tier()) {
      INFO(tier.name);
      Streamed plain{tier.make(folder.map)};
      Streamed verified{folder.verified(tier)};
      REQUIRE(folder.stream(plain) == 0);
      REQUIRE(folder.stream(verified) == 0);
      folder.flip(changed);
      if (tier.reads_files_once) {
        CHECK(folder.stream(plain) == 0);
        CHECK(folder.stream(verified) == 0);
      } else {
        plain.pipeline().close();  // nothing of it is resident
        CHECK(folder.stream(plain) == 1);
        CHECK_THROWS_WITH(
            [&] {
              for (int pass = 0; pass < 2; ++pass)
                folder.stream(verified);  // one may be prefetched
            }(),
            ContainsSubstring("block 1") && ContainsSubstring(".safetensors") &&
                ContainsSubstring("offset ") && ContainsSubstring("model.layers.1.") &&
                ContainsSubstring("chunk at 0: checksum ") && ContainsSubstring(" expected, ") &&
                ContainsSubstring(" found"));
      }
      folder.flip(changed);
      try {
        folder.stream(verified);
      } catch (const bs::StorageError& error) {  // what was fetched ahead of the bytes' return
        CHECK(error.code() == bs::ChecksumErrc::mismatch);
      }
      CHECK(folder.stream(verified) == 0);
    }
  }
}
