// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/decorators/faulty_storage.hpp>

#include <block_streamer/storage/pooled.hpp>

#include <storage/pattern_reader.hpp>
#include <support/catch.hpp>

#include <algorithm>
#include <deque>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

bs::Pooled<PatternReader> inner(std::size_t threads = 2) {
  return bs::Pooled{PatternReader{pattern_images()}, threads};
}
constexpr bs::BlockId large{5};
constexpr bs::ByteRange some{100, 1000};

bool still_poisoned(const Reads::Read& read) {
  return std::ranges::all_of(read.buffer.span(), [](std::byte b) { return b == poison; });
}

}  // namespace

TEST_CASE("without a rule the decorated tier is a conforming tier") {
  std::deque<bs::FaultScript> scripts;
  check_tier([&] { return bs::FaultyStorage{inner(), scripts.emplace_back()}; }, pattern_images());
}

TEST_CASE("the named read fails, the others do not") {
  bs::FaultScript script;
  script.fail(2, std::make_error_code(std::errc::io_error));
  script.fail_from(4, std::make_error_code(std::errc::no_such_device));
  bs::FaultyStorage tier{inner(), script};
  Reads reads;
  for (int i = 0; i < 6; ++i) reads.start(tier, large, some);
  reads.wait();
  CHECK(reads[1].error == std::error_code{});
  CHECK(reads[2].error == std::errc::io_error);
  CHECK(still_poisoned(reads[2]));
  CHECK(reads[3].error == std::error_code{});
  CHECK(reads[4].error == std::errc::no_such_device);
  CHECK(reads[5].error == std::errc::no_such_device);
  CHECK(script.started() == 6);
}

TEST_CASE("b40_a_read_that_falls_short_is_an_error_and_leaves_the_rest_untouched") {
  bs::FaultScript script;
  script.shorten(0, 300);
  bs::FaultyStorage tier{inner(), script};
  Reads reads;
  auto& read = reads.start(tier, large, some);
  reads.wait();
  CHECK(read.error == std::errc::io_error);
  CHECK(read.byte_count == 0);
  const Bytes expected = pattern_bytes(5, 100, 300);
  CHECK(std::ranges::equal(read.buffer.span().first(300), expected));
  CHECK(std::ranges::all_of(read.buffer.span().subspan(300),
                            [](std::byte b) { return b == poison; }));
}

TEST_CASE("a held read writes nothing until it is released") {
  bs::FaultScript script;
  script.hold(0);
  bs::FaultyStorage tier{inner(), script};
  Reads reads;
  reads.start(tier, large, some);
  reads.start(tier, large, some);
  script.wait_for_held(1);
  CHECK(still_poisoned(reads[0]));
  script.release(0);
  reads.check_all(pattern_images());
  CHECK(script.held() == 0);
}

TEST_CASE("a read released before it comes passes freely") {
  bs::FaultScript script;
  script.hold_from(0);
  script.release(1);
  bs::FaultyStorage tier{inner(), script};
  Reads reads;
  for (int i = 0; i < 3; ++i) reads.start(tier, large, some);
  script.wait_for_started(3);
  CHECK(script.held() == 2);
  script.release_all();
  reads.check_all(pattern_images());
}

TEST_CASE("a held completion has its bytes but is not reported") {
  bs::FaultScript script;
  script.hold_completion(0);
  bs::FaultyStorage tier{inner(), script};
  Reads reads;
  auto& read = reads.start(tier, large, some);
  script.wait_for_held(1);
  CHECK(read.buffer.holds(pattern_bytes(5, 100, 1000)));
  CHECK(reads.ended() == 0);
  script.release(0);
  reads.check_all(pattern_images());
}

TEST_CASE("b45_completions_come_in_the_order_that_the_script_names_and_carry_their_own_bytes") {
  for (int round = 0; round < 20; ++round) {
    bs::FaultScript script;
    script.report_in_order({3, 0, 2, 1});
    bs::FaultyStorage tier{inner(3), script};
    Reads reads;
    for (std::uint64_t i = 0; i < 4; ++i) reads.start(tier, large, {i * 7919, 501 + i});
    reads.check_all(pattern_images());
    REQUIRE(reads.order() == std::vector<std::size_t>{3, 0, 2, 1});
  }
}

TEST_CASE("releasing everything also ends orders that can no longer be kept") {
  bs::FaultScript script;
  script.report_in_order({9, 0});
  script.hold_completion(1);
  bs::FaultyStorage tier{inner(), script};
  Reads reads;
  reads.start(tier, large, some);
  reads.start(tier, large, some);
  script.wait_for_held(1);
  CHECK(reads.ended() == 0);
  script.release_all();
  reads.check_all(pattern_images());
}

TEST_CASE("a delayed read is overtaken by as many reads as the script says") {
  for (int round = 0; round < 20; ++round) {
    bs::FaultScript script;
    script.delay(1, 2);
    bs::FaultyStorage tier{inner(1), script};  // one thread: the others end in their order
    Reads reads;
    for (std::uint64_t i = 0; i < 6; ++i) reads.start(tier, large, {i * 7919, 501 + i});
    reads.check_all(pattern_images());
    auto order = reads.order();
    const auto place = std::ranges::find(order, std::size_t{1}) - order.begin();
    REQUIRE(place <= 3);  // nothing else in flight: at once; else behind reads 2 and 3
    std::erase(order, std::size_t{1});
    REQUIRE(std::ranges::is_sorted(order));
  }
}

TEST_CASE("a delayed read is not held up when nothing else is in flight, nor at the end") {
  bs::FaultScript script;
  script.delay(0, 5);
  script.delay(1, 5);
  script.delay(2, 5);
  Reads reads;
  bs::FaultyStorage tier{inner(2), script};
  reads.start(tier, large, some);
  reads.check_all(pattern_images());
  reads.start(tier, large, some);
  reads.start(tier, large, some);
  reads.check_all(pattern_images());
}

TEST_CASE("b54_the_destructor_ends_what_is_held_and_waits_for_the_rest") {
  bs::FaultScript script;
  script.hold(1);
  script.hold_completion(2);
  Reads reads;
  {
    bs::FaultyStorage tier{inner(1), script};
    for (int i = 0; i < 4; ++i) reads.start(tier, large, some);
  }
  REQUIRE(reads.ended() == 4);
  CHECK(reads[0].error == std::error_code{});
  CHECK(reads[1].error == std::errc::operation_canceled);
  CHECK(still_poisoned(reads[1]));
  CHECK(reads[2].error == std::error_code{});
  CHECK(reads[3].error == std::error_code{});
}
