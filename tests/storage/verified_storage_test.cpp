// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/decorators/verified_storage.hpp>

#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>

#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

#include <fstream>
#include <set>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

/// The sums of the pattern's blocks, in chunks of 4096 bytes: many a block, most of them shared by
/// two reads.
bs::ShardManifest sums_of(const PatternFiles& files) {
  bs::ShardManifest manifest;
  manifest.chunk_byte_count = 4096;
  for (std::size_t f = 0; f < files.files.size(); ++f) {
    manifest.files.push_back({files.files[f].filename().string(), files.sizes[f], std::nullopt});
  }
  for (std::size_t b = 0; b < files.map.blocks().size(); ++b) {
    bs::SummedRange range{files.map.prefixes()[b], {}, 0, 0, {}};
    for (const bs::Extent& extent : files.map.blocks()[b].extents) {
      range.extents.push_back({extent.file, {extent.file_offset, extent.byte_count}});
    }
    manifest.blocks.push_back(bs::sum_range(range, files.files, manifest.chunk_byte_count));
  }
  return manifest;
}

/// As `files` but for another granularity; the bytes are the same.
struct Rounded {
  explicit Rounded(std::uint32_t granularity)
      : manifest{sums_of(PatternFiles{})}, files{granularity} {}
  [[nodiscard]] std::vector<bs::ImageSums> sums() const {
    return bs::make_image_sums(files.map, manifest, "m.json");
  }
  bs::ShardManifest manifest;
  PatternFiles files;
};

void flip(const std::filesystem::path& path, std::uint64_t offset) {
  std::fstream file{path, std::ios::binary | std::ios::in | std::ios::out};
  file.seekg(static_cast<std::streamoff>(offset));
  const auto byte = static_cast<char>(file.get());
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ 16));
  REQUIRE(file.good());
}

}  // namespace

TEST_CASE("a verified tier is a conforming tier, over any tier and at any granularity") {
  for (const std::uint32_t granularity : {1, 512, 4096}) {
    const Rounded r{granularity};
    if (granularity == 1) {
      check_tier(
          [&] {
            return bs::VerifiedStorage{bs::FileStorage{r.files.map}, r.sums()};
          },
          r.files.images);
      check_tier(
          [&] {
            return bs::VerifiedStorage{bs::MappedStorage{r.files.map}, r.sums()};
          },
          r.files.images);
      check_tier(
          [&] {
            return bs::VerifiedStorage{bs::RamStorage::load(r.files.map), r.sums()};
          },
          r.files.images);
    }
    bs::VerifiedStorage tier{bs::FileStorage{r.files.map}, r.sums()};
    check_whole_images(tier, r.files.images);
    Reads reads;
    start_random_reads(reads, tier, 300, granularity);
    reads.check_all(r.files.images);
  }
}

TEST_CASE("a changed byte fails every read that touches its chunk and no other") {
  for (const std::uint32_t granularity : {1, 512}) {
    const Rounded r{granularity};
    const bs::BlockId block{4};  // bytes [100000, 400001) of file 2
    const std::uint64_t begin = granularity == 1 ? 100'000 : bs::round_down(100'000, granularity);
    const std::uint64_t wrong = 100'000 + 5 * 4096 + 77;  // in chunk 5
    flip(r.files.files[2], wrong);
    bs::VerifiedStorage tier{bs::FileStorage{r.files.map}, r.sums()};
    const std::uint64_t size = tier.image(block).byte_count;
    int failed = 0;
    for (std::uint64_t at = 0; at + 2048 <= size; at += 2048) {
      const bool touches =
          begin + at < 100'000 + 6 * 4096 && begin + at + 2048 > 100'000 + 5 * 4096;
      const auto error = read_error(tier, block, {at, 2048});
      INFO("image offset " << at << ": " << error.message());
      CHECK((error == bs::ChecksumErrc::mismatch) == touches);
      failed += touches ? 1 : 0;
    }
    CHECK(failed >= 2);
    CHECK(read_error(tier, block, {0, size}) == bs::ChecksumErrc::mismatch);
    CHECK(read_error(tier, bs::BlockId{0}, {0, tier.image(bs::BlockId{0}).byte_count}) ==
          std::error_code{});
  }
}

TEST_CASE("a mismatch is located with its chunk and both sums") {
  const Rounded r{1};
  const bs::BlockId block{4};
  flip(r.files.files[2], 100'000 + 5 * 4096);
  bs::VerifiedStorage tier{bs::FileStorage{r.files.map}, r.sums()};
  CHECK(tier.locate(block, 0) == r.files.map.locate(block, 0));
  CHECK(read_error(tier, block, {8192, 100'000}) == bs::ChecksumErrc::mismatch);
  const std::string text = tier.locate(block, 8192);
  INFO(text);
  CHECK(text.find(r.files.map.locate(block, 5 * 4096)) == 0);
  CHECK(text.find(", chunk at 20480: checksum ") != std::string::npos);
  CHECK(text.find(bs::detail::crc_text(r.manifest.blocks[4].chunks[5]) + " expected, ") !=
        std::string::npos);
  CHECK(tier.locate(block, 0) == r.files.map.locate(block, 0));  // only of the read that failed
}

TEST_CASE("every one of several reads that fail together is located, until it is read again") {
  const Rounded r{1};
  const bs::BlockId block{4};
  flip(r.files.files[2], 100'000 + 5 * 4096);
  bs::VerifiedStorage tier{bs::FileStorage{r.files.map}, r.sums()};
  const std::vector<std::uint64_t> begins{8192, 3 * 4096, 5 * 4096, 5 * 4096 + 100};
  for (const std::uint64_t begin : begins)
    CHECK(read_error(tier, block, {begin, 20'000}) == bs::ChecksumErrc::mismatch);
  for (const std::uint64_t begin : begins) {
    INFO("image offset " << begin);
    CHECK(tier.locate(block, begin).find(", chunk at 20480: checksum ") != std::string::npos);
  }
  flip(r.files.files[2], 100'000 + 5 * 4096);  // as it was
  CHECK(read_error(tier, block, {8192, 20'000}) == std::error_code{});
  CHECK(tier.locate(block, 8192) == r.files.map.locate(block, 8192));
}

TEST_CASE("an error of the tier is passed on, in the read and in the rest of a chunk") {
  const Rounded r{1};
  for (const std::uint64_t number : {0, 1, 2}) {
    bs::FaultScript script;
    script.fail(number, std::make_error_code(std::errc::no_such_device));
    bs::VerifiedStorage tier{bs::FaultyStorage{bs::FileStorage{r.files.map}, script}, r.sums()};
    CHECK(read_error(tier, bs::BlockId{4}, {5000, 9000}) == std::errc::no_such_device);
    CHECK(read_error(tier, bs::BlockId{4}, {5000, 9000}) == std::error_code{});
  }
}

TEST_CASE("what is compared is what the caller got, not what is read for the rest of a chunk") {
  const Rounded r{1};
  bs::FaultScript script;
  script.hold(1);  // the read of the rest
  bs::VerifiedStorage tier{bs::FaultyStorage{bs::FileStorage{r.files.map}, script}, r.sums()};
  Reads reads;
  auto& read = reads.start(tier, bs::BlockId{4}, {0, 100});
  script.wait_for_held(1);
  read.buffer.span()[50] ^= std::byte{1};  // as a device that wrote elsewhere would
  script.release_all();
  reads.wait();
  CHECK(read.error == bs::ChecksumErrc::mismatch);
}

TEST_CASE("aligned reads of whole chunks read nothing else") {
  const Rounded r{1};
  bs::FaultScript script;
  bs::VerifiedStorage tier{bs::FaultyStorage{bs::FileStorage{r.files.map}, script}, r.sums()};
  const std::uint64_t size = tier.image(bs::BlockId{4}).byte_count;
  Reads reads;
  for (std::uint64_t at = 0; at < size; at += 8192) {
    reads.start(tier, bs::BlockId{4}, {at, std::min<std::uint64_t>(8192, size - at)});
  }
  reads.check_all(r.files.images);
  CHECK(script.started() == reads.size());
}

namespace {
/// A tier that is told where reads will go.
class Told : public bs::FileStorage {
 public:
  using FileStorage::FileStorage;
  void prepare(std::span<std::byte> memory) noexcept { told += memory.size(); }
  void forget(std::span<std::byte> memory) noexcept { told -= memory.size(); }
  static inline std::size_t told = 0;
};
template <class Tier>
concept told_tier = requires(Tier& tier, std::span<std::byte> memory) {
  tier.prepare(memory);
};
}  // namespace

TEST_CASE("a tier that wants to know the memory of reads is told through the decorator") {
  const Rounded r{1};
  bs::VerifiedStorage tier{Told{r.files.map}, r.sums()};
  std::array<std::byte, 100> memory{};
  tier.prepare(memory);
  CHECK(Told::told == 100);
  tier.forget(memory);
  CHECK(Told::told == 0);
  STATIC_REQUIRE_FALSE(told_tier<bs::VerifiedStorage<bs::FileStorage>>);
}

TEST_CASE("sums of other blocks or other bytes are refused when the tier is made") {
  const Rounded r{1};
  const auto refused = [&](const bs::ShardManifest& manifest, const char* part) {
    CHECK_THROWS_WITH(bs::make_image_sums(r.files.map, manifest, "m.json"),
                      ContainsSubstring(part));
  };
  bs::ShardManifest manifest = r.manifest;
  manifest.blocks.pop_back();
  refused(manifest, "no checksums of 'b4.'");
  manifest = r.manifest;
  manifest.blocks[4].extents[0].range.offset += 1;
  refused(manifest, "not those of this model's block");
  manifest = r.manifest;
  manifest.files[2].name = "elsewhere";
  refused(manifest, "not those of this model's block");
  CHECK_THROWS_AS((bs::VerifiedStorage{bs::FileStorage{r.files.map}, {}}), bs::ContractViolation);
}
