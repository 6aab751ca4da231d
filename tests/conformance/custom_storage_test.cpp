// SPDX-License-Identifier: Apache-2.0
// The tier of docs/custom_storage.md, as it stands there.
#include <support/catch.hpp>

// [tier]
#include <block_streamer/storage/pooled.hpp>

#include <iostream>
#include <map>
#include <sstream>
#include <string>

namespace bs = block_streamer;

/// Blocks that lie in a key-value store, one value a block.
class StoreReader {
 public:
  StoreReader(const std::map<std::string, std::vector<std::byte>>& store,
              std::vector<bs::BlockImage> images)
      : store_{&store}, images_{std::move(images)} {}
  std::size_t block_count() const noexcept { return images_.size(); }
  const bs::BlockImage& image(bs::BlockId block) const noexcept {
    return images_[bs::index_of(block)];
  }
  std::error_code read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out) {
    const auto found = store_->find("block/" + std::to_string(bs::index_of(block)));
    if (found == store_->end()) return std::make_error_code(std::errc::no_such_file_or_directory);
    std::ranges::copy(std::span{found->second}.subspan(range.offset, range.byte_count),
                      out.begin());
    return {};
  }

 private:
  const std::map<std::string, std::vector<std::byte>>* store_;
  std::vector<bs::BlockImage> images_;
};
static_assert(bs::block_reader<StoreReader>);
// [tier]

// [suite]
#include <block_streamer/testing/storage_conformance.hpp>

bool conforms(bs::Pooled<StoreReader> tier, const bs::testing::Images& expected) {
  const auto print = [](const bs::testing::Finding& f) {
    std::cerr << f.promise << ": " << f.found << '\n';
  };
  return static_cast<bool>(bs::testing::check_storage_tier(std::move(tier), expected, print));
}
// [suite]

TEST_CASE("the tier that the documentation shows conforms") {
  std::map<std::string, std::vector<std::byte>> store;
  bs::testing::Images expected;
  std::vector<bs::BlockImage> images;
  for (const std::size_t size : {1000, 1, 4097}) {
    auto& bytes = expected.emplace_back(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + size);
    store["block/" + std::to_string(images.size())] = bytes;
    bs::BlockImage image;
    image.byte_count = size;
    image.segments = {{0, 0, size}};
    image.part_begin = {0, 1};
    image.layout.slot_byte_count = {size};
    images.push_back(std::move(image));
  }
  CHECK(conforms(bs::Pooled{StoreReader{store, images}, 2}, expected));
  std::ostringstream findings;
  struct Redirected {
    std::streambuf* before;
    ~Redirected() { std::cerr.rdbuf(before); }
  } const redirected{std::cerr.rdbuf(findings.rdbuf())};
  store["block/1"][0] ^= std::byte{1};
  CHECK_FALSE(conforms(bs::Pooled{StoreReader{store, images}, 2}, expected));
  CHECK(findings.str().starts_with("the bytes are those of the image range: block 1 [0, 1)"));
  store.erase("block/1");
  CHECK_FALSE(conforms(bs::Pooled{StoreReader{store, images}, 2}, expected));
}
