// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/tiered_storage.hpp>

#include <storage/pattern_files.hpp>
#include <storage/pattern_reader.hpp>
#include <support/catch.hpp>

#include <numeric>
#include <thread>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

/// A tier that counts what is asked of it.
class Counted {
 public:
  Counted(Images images, std::size_t& reads, std::uint32_t granularity = 1)
      : tier_{PatternReader{std::move(images), granularity}, 2}, reads_{&reads} {}
  [[nodiscard]] std::size_t block_count() const noexcept { return tier_.block_count(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept { return tier_.image(b); }
  void async_read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    ++*reads_;
    tier_.async_read(block, range, out, std::move(done));
  }

 private:
  bs::Pooled<PatternReader> tier_;
  std::size_t* reads_;
};

std::vector<std::uint8_t> flags(std::size_t count, std::uint32_t bits) {
  std::vector<std::uint8_t> result;
  for (std::size_t i = 0; i < count; ++i) result.push_back(bits >> i & 1U);
  return result;
}

}  // namespace

TEST_CASE("a tier conforms whatever part of it is in memory") {
  const PatternFiles files;
  const std::size_t n = files.images.size();
  for (std::uint32_t set = 0; set < 1U << n; ++set) {
    check_tier(
        [&] {
          return bs::TieredStorage{bs::FileStorage{files.map}, flags(n, set)};
        },
        files.images);
  }
}

TEST_CASE("it conforms over a tier that reads whole sectors") {
  const PatternFiles files{512};
  check_tier(
      [&] {
        return bs::TieredStorage{bs::FileStorage{files.map}, flags(files.images.size(), 0b10101)};
      },
      files.images);
}

TEST_CASE("blocks in memory are read once, the others each time") {
  const Images images = pattern_images();
  std::size_t reads = 0;
  bs::TieredStorage tier{Counted{images, reads}, flags(images.size(), 0b110100)};
  CHECK(tier.memory_block_count() == 3);
  const std::size_t to_fill = reads;
  check_whole_images(tier, images);
  check_whole_images(tier, images);
  CHECK(reads == to_fill + 2 * 3);
  for (std::size_t b = 0; b < images.size(); ++b) {
    const auto bytes = tier.bytes(bs::block_at(b));
    const bool held = tier.in_memory(bs::block_at(b));
    CHECK(held == (b == 2 || b == 4 || b == 5));
    CHECK(std::ranges::equal(bytes, held ? images[b] : Bytes{}));
  }
  CHECK(tier.regions().size() == 3);
}

TEST_CASE("what is in memory stays where it is when the tier moves") {
  const Images images = pattern_images();
  std::size_t reads = 0;
  bs::TieredStorage tier{Counted{images, reads}, flags(images.size(), 0b111111)};
  const std::byte* const before = tier.bytes(bs::block_at(5)).data();
  const bs::TieredStorage moved{std::move(tier)};
  CHECK(moved.bytes(bs::block_at(5)).data() == before);
  CHECK(moved.regions()[4].data() == before);  // one is empty and has none
}

TEST_CASE("a read of a block in memory does not end on the thread that began it") {
  // That is the I/O loop, which has better to do than to copy.
  const Images images{pattern_bytes(0, 0, 100'000)};
  std::size_t reads = 0;
  bs::TieredStorage tier{Counted{images, reads}, {1}};
  Reads pending;
  std::thread::id ended_on;
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  const Buffer buffer{100'000};
  tier.async_read(bs::block_at(0), {0, 100'000}, buffer.span(), [&](std::error_code, std::size_t) {
    const std::scoped_lock lock{mutex};
    ended_on = std::this_thread::get_id();
    done = true;
    ended.notify_all();
  });
  std::unique_lock lock{mutex};
  ended.wait(lock, [&] { return done; });
  CHECK(ended_on != std::this_thread::get_id());
  CHECK(buffer.holds(images[0]));
}

TEST_CASE("a budget takes what fits, spread over the list, and no more") {
  Images images;
  for (std::size_t b = 0; b < 12; ++b) images.push_back(pattern_bytes(b, 0, 1000));
  std::size_t reads = 0;
  const auto tier = bs::TieredStorage::within(Counted{images, reads}, 4999);
  CHECK(tier.memory_block_count() == 4);
  std::size_t run = 0;
  for (std::size_t b = 0; b < 2 * images.size(); ++b) {
    run = tier.in_memory(bs::block_at(b % images.size())) ? 0 : run + 1;
    CHECK(run <= 3);  // of twelve blocks every third is there
  }
  CHECK(bs::TieredStorage::within(Counted{images, reads}, 1 << 20).memory_block_count() == 12);
}

TEST_CASE("a budget that holds no block is refused, with both sizes") {
  const Images images{pattern_bytes(0, 0, 2000), pattern_bytes(1, 0, 1500)};
  std::size_t reads = 0;
  CHECK_THROWS_WITH(bs::TieredStorage::within(Counted{images, reads}, 1499),
                    ContainsSubstring("1499") && ContainsSubstring("1500"));
  CHECK(reads == 0);
}

TEST_CASE("a read that fails while memory is filled names its place, and nothing stays under way") {
  const PatternFiles files;
  for (std::uint64_t failing = 0; failing < 3; ++failing) {
    bs::FaultScript script;
    script.fail(failing, std::make_error_code(std::errc::io_error));
    CHECK_THROWS_WITH((bs::TieredStorage{bs::FaultyStorage{bs::FileStorage{files.map}, script},
                                         flags(files.images.size(), 0b11111)}),
                      ContainsSubstring("cannot read") && ContainsSubstring("block"));
  }
}

TEST_CASE("memory that the system refuses means that the rest streams") {
  // A block of 2^60 bytes: nobody has that. It is not read here.
  struct Huge {
    std::vector<bs::BlockImage> images{plain_image(100), plain_image(std::uint64_t{1} << 60),
                                       plain_image(100)};
    [[nodiscard]] std::size_t block_count() const noexcept { return images.size(); }
    [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept {
      return images[bs::index_of(b)];
    }
    void async_read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> out,
                    bs::IoCompletion done) noexcept {
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = pattern(bs::index_of(b), r.offset + i);
      done({}, out.size());
    }
  };
  bs::TieredStorage tier{Huge{}, {1, 1, 1}};
  CHECK(tier.memory_block_count() == 1);
  CHECK(tier.in_memory(bs::block_at(0)));
  CHECK_FALSE(tier.in_memory(bs::block_at(1)));
  CHECK(std::ranges::equal(tier.bytes(bs::block_at(0)), pattern_bytes(0, 0, 100)));
  Reads reads;
  reads.start(tier, bs::block_at(2), {10, 20});
  reads.wait();
  CHECK(reads[0].buffer.holds(pattern_bytes(2, 10, 20)));
}
