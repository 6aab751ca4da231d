// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/decorators/traced_storage.hpp>

#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>

#include <storage/pattern_reader.hpp>
#include <support/catch.hpp>

#include <mutex>
#include <vector>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

struct Sink {
  bool on = true;
  std::mutex mutex;
  std::vector<bs::TraceEvent> events;
  [[nodiscard]] bool enabled() const noexcept { return on; }
  void record(const bs::TraceEvent& event) noexcept {
    const std::scoped_lock lock{mutex};
    events.push_back(event);
  }
};

/// Ticks once each time that it is asked.
struct Ticks {
  std::int64_t* ticks;
  bs::Nanoseconds operator()() const noexcept { return bs::Nanoseconds{++*ticks}; }
};

/// An addressable tier over patterns.
struct Memory {
  Images images = pattern_images();
  std::vector<bs::BlockImage> table;
  std::vector<std::span<std::byte>> all;
  Memory() {
    for (Bytes& image : images) {
      table.push_back(plain_image(image.size()));
      all.emplace_back(image);
    }
  }
  [[nodiscard]] std::size_t block_count() const noexcept { return table.size(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept {
    return table[bs::index_of(b)];
  }
  void async_read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    const std::error_code refused = bs::check_read(*this, b, r, out);
    if (!refused) std::ranges::copy(bytes(b).subspan(r.offset, r.byte_count), out.begin());
    done(refused, refused ? 0 : out.size());
  }
  [[nodiscard]] std::span<const std::byte> bytes(bs::BlockId b) const noexcept {
    return images[bs::index_of(b)];
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept { return all; }
};

}  // namespace

TEST_CASE("a traced tier is a conforming tier, recording or not, addressable or not") {
  Sink sink;
  for (const bool on : {true, false}) {
    sink.on = on;
    check_tier(
        [&] {
          return bs::TracedStorage{bs::Pooled{PatternReader{pattern_images()}, 2}, sink};
        },
        pattern_images());
    check_tier([&] { return bs::TracedStorage{Memory{}, sink}; }, pattern_images());
    check_tier([&] { return bs::TracedStorage{bs::AnyStorage{Memory{}}, sink}; }, pattern_images());
  }
}

TEST_CASE("a read is an interval from its request to its completion, in the lane that was asked") {
  Sink sink;
  std::int64_t ticks = 0;
  bs::TracedStorage tier{Memory{}, sink, bs::Lane::copy_in, 3, Ticks{&ticks}};
  Reads reads;
  reads.start(tier, bs::block_at(5), {100, 1000});
  reads.start(tier, bs::block_at(1), {0, 7});
  reads.check_all(pattern_images());
  REQUIRE(sink.events.size() == 2);
  const bs::TraceEvent& event = sink.events[0];
  CHECK(event.name == "tier read");
  CHECK(event.lane == bs::Lane::copy_in);
  CHECK(event.device == 3);
  CHECK(event.part == bs::PartId{bs::block_at(5)});
  CHECK(event.begin == bs::Nanoseconds{1});
  CHECK(event.end == bs::Nanoseconds{2});
  CHECK(event.byte_count == 1000);
  CHECK(sink.events[1].begin == bs::Nanoseconds{3});
}

TEST_CASE("a read that fails is seen as one, and ends as it did") {
  Sink sink;
  bs::FaultScript script;
  script.fail(0, std::make_error_code(std::errc::no_such_device));
  bs::TracedStorage tier{bs::FaultyStorage{Memory{}, script}, sink};
  CHECK(read_error(tier, bs::block_at(5), {0, 10}) == std::errc::no_such_device);
  REQUIRE(sink.events.size() == 1);
  CHECK(sink.events[0].name == "failed tier read");
}

TEST_CASE("what is addressable stays so under a decorator, and only that") {
  Sink sink;
  bs::AnyStorage memory{bs::TracedStorage{bs::AnyStorage{Memory{}}, sink}};
  CHECK(memory.addressable());
  CHECK(std::ranges::equal(memory.bytes(bs::block_at(2)), pattern_images()[2]));
  bs::AnyStorage pooled{
      bs::TracedStorage{bs::AnyStorage{bs::Pooled{PatternReader{pattern_images()}, 1}}, sink}};
  CHECK_FALSE(pooled.addressable());
}

TEST_CASE("reads that overlap are told apart in the timeline") {
  bs::PerfettoWriter writer;
  {
    bs::TracedStorage tier{bs::Pooled{PatternReader{pattern_images()}, 3}, writer};
    Reads reads;
    start_random_reads(reads, tier, 30, 1);
    reads.check_all(pattern_images());
  }
  CHECK(writer.size() == 30);
}
