// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/ram_storage.hpp>

#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

bs::BlockLayout two_part_layout() {
  bs::BlockLayout layout;
  layout.slot_byte_count = {300, 0, 77};
  layout.tensors = {{{"a", bs::DType::u8, {10}}, 0, 0, 10},
                    {{"b", bs::DType::u8, {44}}, 0, 256, 44},
                    {{"none", bs::DType::u8, {0}}, 1, 0, 0},
                    {{"c", bs::DType::u8, {77}}, 2, 0, 77}};
  return layout;
}

void fill(std::span<std::byte> out, std::uint64_t seed) {
  std::ranges::copy(pattern_bytes(seed, 0, out.size()), out.begin());
}

}  // namespace

TEST_CASE("images loaded from files conform, with one thread or more") {
  const PatternFiles files;
  for (const std::size_t threads : {1U, 3U}) {
    check_tier([&] { return bs::RamStorage::load(files.map, threads); }, files.images);
  }
}

TEST_CASE("b32 loaded images lie in one region, aligned, at stable addresses") {
  const PatternFiles files;
  bs::RamStorage tier = bs::RamStorage::load(files.map);
  REQUIRE(tier.regions().size() == 1);
  const std::span<std::byte> region = tier.regions()[0];
  std::uint64_t payload = 0;
  std::vector<const std::byte*> addresses;
  for (std::size_t b = 0; b < files.images.size(); ++b) {
    const auto bytes = tier.bytes(bs::block_at(b));
    REQUIRE(std::ranges::equal(bytes, files.images[b]));
    payload += bytes.size();
    addresses.push_back(bytes.data());
    if (bytes.empty()) continue;
    CHECK(reinterpret_cast<std::uintptr_t>(bytes.data()) % bs::tensor_alignment == 0);
    CHECK(bytes.data() >= region.data());
    CHECK(bytes.data() + bytes.size() <= region.data() + region.size());
  }
  CHECK(region.size() < payload + files.images.size() * bs::tensor_alignment);
  CHECK(static_cast<double>(region.size()) <= 1.02 * static_cast<double>(payload));

  const bs::RamStorage moved{std::move(tier)};
  for (std::size_t b = 0; b < addresses.size(); ++b) {
    CHECK(moved.bytes(bs::block_at(b)).data() == addresses[b]);
  }
}

TEST_CASE("loading goes through pieces larger than one read") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "large";
  const std::size_t size = (std::size_t{17} << 20) + 13;
  const Images images{pattern_bytes(7, 5, size - 5)};
  write_bytes(path, pattern_bytes(7, 0, size));
  const bs::BlockMap map{{block_of({{0, {5, size - 5}}}, 1)}, {path}, {"x."}};
  const bs::RamStorage tier = bs::RamStorage::load(map, 3);
  CHECK(std::ranges::equal(tier.bytes(bs::BlockId{0}), images[0]));
}

TEST_CASE("over-read at a granularity is kept as the files have it, with zeros beyond their ends") {
  const PatternFiles files{4096};
  bs::RamStorage tier = bs::RamStorage::load(files.map);
  check_whole_images(tier, files.images);
}

TEST_CASE("b64_loading_from_a_missing_or_short_file_names_it") {
  const PatternFiles files;
  std::filesystem::resize_file(files.files[0], 100);
  try {
    static_cast<void>(bs::RamStorage::load(files.map));
    FAIL("loaded");
  } catch (const bs::StorageError& error) {
    CHECK(std::string{error.what()}.find("part 0.bin") != std::string::npos);
  }
  CHECK_THROWS_AS(bs::RamStorage::load(files.map, 0), bs::ContractViolation);
}

TEST_CASE("loaded images still know where they came from") {
  const PatternFiles files;
  const bs::AnyStorage tier{bs::RamStorage::load(files.map)};
  CHECK(tier.locate(bs::BlockId{1}, 9).find("part 1.bin, offset 9") != std::string::npos);
  CHECK(tier.addressable());
}

TEST_CASE("a layout becomes an image with the slots one after another") {
  const bs::BlockImage image = bs::image_of_layout(two_part_layout());
  CHECK(image.byte_count == 512 + 77);
  CHECK(image.read_granularity == 1);
  CHECK(image.part_begin == std::vector<std::uint32_t>{0, 1, 1, 2});
  CHECK(image.segments == std::vector<bs::Segment>{{0, 0, 300}, {512, 0, 77}});
  CHECK(image.layout.tensors.size() == 4);
}

TEST_CASE("blocks of layouts start as zeros and conform once filled") {
  const std::vector<bs::BlockLayout> layouts{two_part_layout(), bs::BlockLayout{},
                                             two_part_layout()};
  bs::RamStorage blank{layouts};
  CHECK(std::ranges::all_of(blank.bytes(bs::BlockId{2}),
                            [](std::byte b) { return b == std::byte{}; }));
  const auto make = [&] {
    bs::RamStorage tier{layouts};
    for (std::size_t b = 0; b < layouts.size(); ++b) fill(tier.writable_bytes(bs::block_at(b)), b);
    return tier;
  };
  Images images;
  for (std::size_t b = 0; b < layouts.size(); ++b) {
    images.push_back(pattern_bytes(b, 0, b == 1 ? 0 : 512 + 77));
  }
  check_tier(make, images);
}

TEST_CASE("a tensor is written at its place in its part") {
  bs::RamStorage tier{{two_part_layout(), two_part_layout()}};
  const bs::BlockLayout& layout = tier.image(bs::BlockId{1}).layout;
  fill(tier.writable_bytes(bs::BlockId{1}, *layout.find("b")), 1);
  fill(tier.writable_bytes(bs::BlockId{1}, *layout.find("c")), 2);
  CHECK(tier.writable_bytes(bs::BlockId{1}, *layout.find("none")).empty());
  const auto bytes = tier.bytes(bs::BlockId{1});
  CHECK(std::ranges::equal(bytes.subspan(256, 44), pattern_bytes(1, 0, 44)));
  CHECK(std::ranges::equal(bytes.subspan(512, 77), pattern_bytes(2, 0, 77)));

  const bs::TensorPlacement foreign{{"d", bs::DType::u8, {301}}, 0, 0, 301};
  CHECK_THROWS_AS(tier.writable_bytes(bs::BlockId{1}, foreign), bs::ContractViolation);
  CHECK_THROWS_AS(tier.writable_bytes(bs::BlockId{2}), bs::ContractViolation);
}

TEST_CASE("storage of no bytes has no region and is read like any other") {
  bs::RamStorage tier{std::vector<bs::BlockLayout>(2)};
  CHECK(tier.regions().empty());
  CHECK(tier.bytes(bs::BlockId{1}).empty());
  CHECK(read_error(tier, bs::BlockId{1}, {0, 0}) == std::error_code{});
  CHECK(bs::RamStorage{std::vector<bs::BlockLayout>{}}.block_count() == 0);
}
