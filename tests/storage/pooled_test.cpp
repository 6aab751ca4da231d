// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/pooled.hpp>

#include <storage/pattern_reader.hpp>
#include <support/catch.hpp>

#include <stdexcept>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

/// Fails in the way that the offset asks for.
struct FailingReader {
  bs::BlockImage table = plain_image(64);
  [[nodiscard]] std::size_t block_count() const noexcept { return 1; }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId) const noexcept { return table; }
  std::error_code read(bs::BlockId, bs::ByteRange range, std::span<std::byte>) {
    switch (range.offset) {
      case 0:
        return std::make_error_code(std::errc::no_such_device);
      case 1:
        throw std::system_error{std::make_error_code(std::errc::timed_out)};
      case 2:
        throw boost::system::system_error{
            boost::system::errc::make_error_code(boost::system::errc::network_down)};
      case 3:
        throw bs::StorageError{"a", "b", std::make_error_code(std::errc::no_space_on_device)};
      case 4:
        throw bs::StorageError{"a", "without a code"};
      case 5:
        throw std::bad_alloc{};
      case 6:
        throw std::runtime_error{"anything"};
      default:
        throw 7;
    }
  }
};

/// Lets a test see how many reads run at once.
struct GatedReader {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    int inside = 0;
    bool open = false;
  };
  Gate* gate;
  bs::BlockImage table = plain_image(64);
  [[nodiscard]] std::size_t block_count() const noexcept { return 1; }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId) const noexcept { return table; }
  std::error_code read(bs::BlockId, bs::ByteRange, std::span<std::byte>) {
    std::unique_lock lock{gate->mutex};
    ++gate->inside;
    gate->changed.notify_all();
    gate->changed.wait(lock, [this] { return gate->open; });
    return {};
  }
};

}  // namespace

TEST_CASE("a pooled reader is a conforming tier, with one thread or more") {
  const Images images = pattern_images();
  for (const std::size_t threads : {1U, 2U, 4U}) {
    check_tier([&] { return bs::Pooled{PatternReader{images}, threads}; }, images);
  }
}

TEST_CASE("granularity holds for offset, size and address") {
  const Images images{pattern_bytes(1, 0, 4096 * 5)};
  bs::Pooled tier{PatternReader{images, 512}, 2};
  Reads reads;
  start_random_reads(reads, tier, 50, 3);
  reads.check_all(images);
  CHECK(read_error(tier, bs::BlockId{0}, {1, 512}) == std::errc::invalid_argument);
  CHECK(read_error(tier, bs::BlockId{0}, {512, 511}) == std::errc::invalid_argument);
  std::error_code error;
  const Buffer buffer{1024};
  {
    bs::Pooled other{PatternReader{images, 512}, 1};
    other.async_read(bs::BlockId{0}, {0, 512}, buffer.span().subspan(8, 512),
                     [&](std::error_code e, std::size_t) { error = e; });
  }
  CHECK(error == std::errc::invalid_argument);
}

TEST_CASE("whatever a reader returns or throws arrives as an error code") {
  bs::Pooled tier{FailingReader{}, 2};
  const auto error = [&](std::uint64_t offset) {
    return read_error(tier, bs::BlockId{0}, {offset, 1});
  };
  CHECK(error(0) == std::errc::no_such_device);
  CHECK(error(1) == std::errc::timed_out);
  CHECK(error(2) == std::errc::network_down);
  CHECK(error(3) == std::errc::no_space_on_device);
  CHECK(error(4) == std::errc::io_error);
  CHECK(error(5) == std::errc::not_enough_memory);
  CHECK(error(6) == std::errc::io_error);
  CHECK(error(7) == std::errc::io_error);
}

TEST_CASE("a failed read reports no bytes") {
  bs::Pooled tier{FailingReader{}, 1};
  Reads reads;
  auto& read = reads.start(tier, bs::BlockId{0}, {0, 8});
  reads.wait();
  CHECK(read.byte_count == 0);
}

TEST_CASE("as many reads run at once as the pool has threads") {
  GatedReader::Gate gate;
  bs::Pooled tier{GatedReader{&gate}, 3};
  Reads reads;
  for (int i = 0; i < 5; ++i) reads.start(tier, bs::BlockId{0}, {0, 8});
  {
    std::unique_lock lock{gate.mutex};
    gate.changed.wait(lock, [&] { return gate.inside == 3; });
    gate.open = true;
  }
  gate.changed.notify_all();
  reads.wait();
  CHECK(gate.inside == 5);
}

TEST_CASE("b54_the_destructor_waits_for_reads_that_have_not_begun") {
  const Images images = pattern_images();
  for (int round = 0; round < 50; ++round) {
    Reads reads;
    {
      bs::Pooled tier{PatternReader{images}, 1};
      start_random_reads(reads, tier, 32, static_cast<std::uint32_t>(round));
    }
    REQUIRE(reads.ended() == 32);
  }
}

TEST_CASE("assigning over a tier waits for its reads") {
  const Images images = pattern_images();
  Reads reads;
  bs::Pooled tier{PatternReader{images}, 1};
  start_random_reads(reads, tier, 32, 5);
  tier = bs::Pooled{PatternReader{images}, 1};
  CHECK(reads.ended() == 32);
  check_whole_images(tier, images);
}

TEST_CASE("a pool without threads is refused") {
  CHECK_THROWS_AS((bs::Pooled{PatternReader{pattern_images()}, 0}), bs::ContractViolation);
}
