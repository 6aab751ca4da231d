// SPDX-License-Identifier: Apache-2.0
// The suite finds each kind of broken tier, and nothing wrong with a good one.
#include <block_streamer/testing/storage_conformance.hpp>

#include <support/catch.hpp>

#include <cstring>
#include <functional>

namespace bs = block_streamer;
namespace testing = bs::testing;

namespace {

testing::Images some_images() {
  testing::Images images;
  for (const std::size_t size : {1, 511, 4096, 0, 4097, 20'003}) {
    auto& image = images.emplace_back(size);
    for (std::size_t i = 0; i < size; ++i) {
      image[i] = static_cast<std::byte>((i * 2654435761U + images.size() * 40503U) >> 7);
    }
  }
  return images;
}
bs::BlockImage image_of(std::uint64_t byte_count) {
  bs::BlockImage image;
  image.byte_count = byte_count;
  if (byte_count > 0) image.segments.push_back({0, 0, byte_count});
  image.part_begin = {0, static_cast<std::uint32_t>(image.segments.size())};
  image.layout.slot_byte_count = {byte_count};
  return image;
}

/// Reads inline, and then does one thing wrong.
struct Tier {
  using Break = std::function<void(std::uint64_t number, bs::ByteRange&, std::span<std::byte>,
                                   std::error_code&, std::size_t&)>;
  explicit Tier(testing::Images held, Break broken = {})
      : images{std::move(held)}, breaks{std::move(broken)} {
    for (const auto& image : images) table.push_back(image_of(image.size()));
  }
  [[nodiscard]] std::size_t block_count() const noexcept { return table.size(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept {
    return table[bs::index_of(b)];
  }
  void async_read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    std::error_code error;
    std::size_t n = out.size();
    if (breaks) breaks(reads++, range, out, error, n);
    const auto& image = images[bs::index_of(block)];
    if (!error && range.byte_count > 0)
      std::memcpy(out.data(), image.data() + range.offset, range.byte_count);
    done(error, n);
  }
  testing::Images images;
  Break breaks;
  std::vector<bs::BlockImage> table;
  std::uint64_t reads = 0;
};
static_assert(bs::storage_tier<Tier>);

std::vector<std::string> broken_promises(Tier tier, const testing::Images& images = some_images()) {
  std::vector<std::string> found;
  const testing::Conformance result = testing::check_storage_tier(
      std::move(tier), images, [&](const testing::Finding& f) { found.push_back(f.promise); },
      {.patience = std::chrono::seconds{1}});
  CHECK(result.broken == found.size());
  CHECK(static_cast<bool>(result) == found.empty());
  return found;
}

}  // namespace

TEST_CASE("a good tier has no findings") {
  CHECK(broken_promises(Tier{some_images()}).empty());
}

TEST_CASE("one wrong thing in one read is found") {
  const auto find = [](const Tier::Break& broken) {
    const auto found = broken_promises(Tier{some_images(), broken});
    REQUIRE_FALSE(found.empty());
    return found.front();
  };
  constexpr std::uint64_t at = 5;  // block 5, whole
  CHECK(find([](auto n, auto& range, auto, auto&, auto&) {
          if (n == at) range = {1, range.byte_count - 1};
        }) == "the bytes are those of the image range");
  CHECK(find([](auto n, auto&, auto out, auto&, auto&) {
          if (n == at) out.data()[out.size()] = std::byte{};
        }) == "a read writes inside `out` only");
  CHECK(find([](auto n, auto&, auto, auto&, auto& count) {
          if (n == at) count -= 1;
        }) == "a read within the image delivers all of its bytes");
  CHECK(find([](auto n, auto&, auto, auto& error, auto&) {
          if (n == at) error = std::make_error_code(std::errc::io_error);
        }) == "a read within the image delivers all of its bytes");
}

TEST_CASE("a wrong table is found, and nothing is read by it") {
  const auto find = [](auto change) {
    Tier tier{some_images()};
    change(tier.table[5]);
    const auto found = broken_promises(std::move(tier));
    REQUIRE_FALSE(found.empty());
    return found.front();
  };
  CHECK(find([](bs::BlockImage& i) { i.byte_count -= 1; }) == "an image is as long as its data");
  CHECK(find([](bs::BlockImage& i) { i.read_granularity = 4096; }) ==
        "an image is a whole number of read granules");
  CHECK(find([](bs::BlockImage& i) { i.segments[0].byte_count += 1; }) ==
        "segments are sorted, disjoint, not empty and in the image");
  CHECK(find([](bs::BlockImage& i) { i.segments[0].byte_count = ~std::uint64_t{0}; }) ==
        "segments are sorted, disjoint, not empty and in the image");
  CHECK(find([](bs::BlockImage& i) {
          i.part_begin = {0, 2};
        }) == "part_begin and slot sizes cover all segments");
  CHECK(find([](bs::BlockImage& i) { i.layout.slot_byte_count = {20'002}; }) ==
        "segments do not meet in the slot and end within it");
  auto fewer = some_images();
  fewer.pop_back();
  CHECK(broken_promises(Tier{fewer}) ==
        std::vector<std::string>{"block_count() is that of the data"});
}

namespace {

/// Keeps the completions of some reads, to be called when a test says so.
struct Keeping {
  std::uint64_t reads = 0;
  std::uint64_t keep_from = ~std::uint64_t{0};
  std::uint64_t keep_to = ~std::uint64_t{0};
  std::vector<std::pair<bs::IoCompletion, std::size_t>> kept;
  bool complete_one() {
    if (kept.empty()) return false;
    auto [done, n] = std::move(kept.back());
    kept.pop_back();
    done({}, n);
    return true;
  }
};
struct KeepingTier : Tier {
  KeepingTier(testing::Images held, Keeping& k) : Tier{std::move(held)}, keeping{&k} {}
  void async_read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    if (range.byte_count > 0)
      std::memcpy(out.data(), images[bs::index_of(block)].data() + range.offset, range.byte_count);
    const std::uint64_t number = keeping->reads++;
    if (number < keeping->keep_from || number >= keeping->keep_to) {
      return done({}, range.byte_count);
    }
    keeping->kept.emplace_back(std::move(done), range.byte_count);
  }
  Keeping* keeping;
};

std::vector<std::string> broken_promises(Keeping& keeping, std::function<bool()> progress) {
  std::vector<std::string> found;
  const auto images = some_images();
  testing::TierSuiteOptions options;
  options.progress = std::move(progress);
  (void)testing::check_storage_tier(
      KeepingTier{images, keeping}, images,
      [&](const testing::Finding& f) { found.push_back(f.promise); }, options);
  return found;
}

}  // namespace

TEST_CASE("b54_a_tier_that_goes_before_its_reads_have_ended_is_found") {
  Keeping counting;
  REQUIRE(broken_promises(counting, {}).empty());
  Keeping late;
  late.keep_from = counting.reads - 1;  // the last read before the tier goes
  CHECK(broken_promises(late, [&] { return late.complete_one(); }) ==
        std::vector<std::string>{"the destructor waits for every read"});
}

TEST_CASE("a read that never ends is found, and the suite does not hang") {
  Keeping lost;
  lost.keep_from = 3;
  lost.keep_to = 4;
  const auto found = broken_promises(lost, [] { return false; });
  CHECK(found == std::vector<std::string>{"every read ends"});
  CHECK(lost.complete_one());  // what it would have written to is still there
}
