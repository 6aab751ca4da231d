// SPDX-License-Identifier: Apache-2.0
// Small runs of the real pipeline in every order in which what is under way can end, and with every
// fault at every place.
#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/testing/choices.hpp>
#include <block_streamer/testing/faulty_backend.hpp>

#include <support/catch.hpp>

#include <random>

#include "simulated_run.hpp"

namespace bs = block_streamer;
using namespace support;
using bs::testing::Choices;

namespace {

/// The invariant that residency never exceeds the slots, asked at every transition.
struct BoundWatch {
  std::uint64_t most = 0;
  std::uint64_t resident = 0, next_sequence = 0, broken = 0;
  void observe(const bs::Transition& t) noexcept {
    broken += t.sequence != next_sequence++;
    resident += t.from == bs::Residency::empty;
    resident -= t.to == bs::Residency::empty;
    broken += resident > most;
  }
};

using Backend = bs::testing::FaultyBackend<bs::SimulatedBackend>;
using Pipeline = bs::BlockPipeline<Backend, bs::VirtualLoop>;

/// A small world in which everything takes no time, so that only the order is left.
struct World {
  std::vector<bs::BlockImage> images;
  std::uint32_t ahead = 1;
  std::uint32_t tickets = 2;
  bool in_place = false;
  bool in_ram = false;
  bool prefetch_next_pass = true;
  int passes = 4;  ///< the first two may be hit by the fault
  /// How often the visitor lingers before a step, letting one more thing happen.
  std::function<bool()> linger = [] { return false; };
};

enum class Fault { none, read, short_read, device_call, block };

struct Injected {
  Fault kind = Fault::none;
  std::uint64_t at = 0;
};

struct Outcome {
  std::size_t wrong_looks = 0;
  std::size_t errors = 0;
  std::uint64_t places = 0;  ///< at which the fault could have been
  bool told_clearly = true;
};

class Play {
 public:
  /// @param order  asked in the first pass only.
  Play(const World& world, Injected fault, bs::VirtualClock::Order order,
       bool tasks_compete = false)
      : world_{world},
        fault_{fault},
        order_{std::move(order)},
        clock_{[this](std::size_t due) { return chosen_ ? order_(due) : std::size_t{0}; },
               tasks_compete} {
    if (fault.kind == Fault::read) {
      script_.fail(fault.at, std::make_error_code(std::errc::io_error));
    } else if (fault.kind == Fault::short_read) {
      script_.shorten(fault.at, 3);
    } else if (fault.kind == Fault::device_call) {
      backend_.fail_call(fault.at);
    }
  }

  /// Two passes that may fail, once, and two that may not.
  Outcome run() {
    {
      watch_.most = std::min<std::uint64_t>(world_.ahead + 1, world_.images.size());
      bs::PipelineOptions options;
      options.prefetch_ahead = world_.ahead;
      options.chunk_byte_count = 10;
      options.staging_byte_count = world_.tickets * 10;
      options.reads_in_flight = world_.tickets;
      options.computes_on_host = world_.in_place;
      options.observer = watch_;
      options.prefetch_next_pass = world_.prefetch_next_pass;
      const auto build = [&] {
        return std::make_unique<Pipeline>(tier(), backend_, options, nullptr,
                                          std::make_unique<bs::VirtualLoop>(clock_));
      };
      std::unique_ptr<Pipeline> pipeline;
      try {
        compute_.emplace(backend_.make_stream());
        pipeline = build();
      } catch (const bs::Error& error) {
        told(error);
        compute_.emplace(backend_.make_stream());
        pipeline = build();
      }
      for (int i = 0; i < world_.passes; ++i) {
        pass(*pipeline);
        if (i == 0 && !world_.prefetch_next_pass) drain(*pipeline);
        chosen_ = false;
      }
      REQUIRE(outcome_.errors <= 1);
      places();
      finish(*pipeline);
    }
    clock_.run_dry();
    REQUIRE(watch_.broken == 0);
    REQUIRE(watch_.resident <= watch_.most);
    return outcome_;
  }

 private:
  bs::AnyStorage tier() {
    if (world_.in_ram) return MemoryTier{world_.images};
    bs::DriveModel drive;
    drive.one_link = false;
    return bs::FaultyStorage{bs::SimulatedStorage{clock_, world_.images, drive, fill_image},
                             script_};
  }
  void pass(Pipeline& pipeline) {
    const auto order = bs::ascending(0, world_.images.size());
    try {
      auto pass = pipeline.begin_pass(order, order, *compute_);
      while (!pass.done()) {
        linger();
        const auto lease = pass.acquire();
        visit(lease.part(), lease.bytes());
        linger();
      }
    } catch (const bs::Error& error) {
      told(error);
    } catch (const Failed&) {
      ++outcome_.errors;
    }
  }
  void drain(Pipeline& pipeline) {
    try {
      pipeline.drain();
    } catch (const bs::Error& error) {
      told(error);
    }
  }
  struct Failed {};
  void visit(bs::PartId part, std::span<std::byte> bytes) {
    const std::size_t block = bs::index_of(part.block);
    const auto look = [this, block, bytes] {
      outcome_.wrong_looks += slot_is_right(world_.images[block], block, bytes) ? 0 : 1;
    };
    if (fault_.kind == Fault::block && visits_++ == fault_.at) throw Failed{};
    world_.in_place ? look() : backend_.compute(*compute_, part, {}, look);
  }
  void linger() {
    while (clock_.pending() > 0 && world_.linger()) clock_.run_one();
  }
  void told(const bs::Error& error) {
    ++outcome_.errors;
    const std::string text = error.what();
    outcome_.told_clearly =
        outcome_.told_clearly && (text.find("block ") == 0 || text.find("simulated: ") == 0);
  }
  void places() {
    outcome_.places = fault_.kind == Fault::device_call ? backend_.calls()
                      : fault_.kind == Fault::block     ? visits_
                                                        : script_.started();
  }
  void finish(Pipeline& pipeline) {
    for (int attempt = 0; attempt < 2; ++attempt) {  // what fails here is told here
      try {
        pipeline.drain();
        auto over = backend_.make_event();
        backend_.record(over, *compute_);
        backend_.synchronize(over);
        return;
      } catch (const bs::Error& error) {
        told(error);
      }
    }
  }

  const World& world_;
  Injected fault_;
  bs::VirtualClock::Order order_;
  bool chosen_ = true;
  bs::VirtualClock clock_;
  Backend backend_{bs::SimulatedBackend{clock_, {{}, {}, true, world_.in_place}}};
  bs::FaultScript script_;
  BoundWatch watch_;
  std::optional<Backend::Stream> compute_;
  Outcome outcome_;
  std::uint64_t visits_ = 0;
};

World world_of(std::size_t blocks, std::uint32_t ahead, std::uint32_t tickets) {
  World world;
  world.images = plain_blocks(std::vector<std::uint64_t>(blocks, 20));  // two chunks of ten bytes
  world.ahead = ahead;
  world.tickets = tickets;
  return world;
}

}  // namespace

namespace {

/// All orders of one pass and its drain; a second pass shows that all is well afterwards.
std::uint64_t run_every_order(World world, Injected fault = {}, bool tasks_compete = false) {
  world.prefetch_next_pass = false;
  world.passes = 2;
  Choices choices;
  do {
    Play play{world, fault, std::ref(choices), tasks_compete};
    const Outcome outcome = play.run();
    REQUIRE(outcome.wrong_looks == 0);
    REQUIRE(outcome.told_clearly);
    if (fault.kind == Fault::none) REQUIRE(outcome.errors == 0);
    REQUIRE(choices.runs() < 200'000);  // else the case is not a small one any more
  } while (choices.next());
  return choices.runs();
}
std::uint64_t orders_with_one_to_three_chunks(std::uint32_t ahead) {
  std::uint64_t orders = 0;
  for (const std::uint32_t tickets : {1U, 2U, 3U}) {
    orders += run_every_order(world_of(3, ahead, tickets));
  }
  return orders;
}

}  // namespace

// Three cases, so that none takes long in a sanitized build.
TEST_CASE("three blocks of two chunks, nothing ahead: every order in which reads and copies end") {
  WARN(orders_with_one_to_three_chunks(0) << " orders");
}
TEST_CASE("three blocks of two chunks, one ahead: every order in which reads and copies end") {
  WARN(orders_with_one_to_three_chunks(1) << " orders");
}
TEST_CASE("three blocks of two chunks, two ahead: every order in which reads and copies end") {
  WARN(orders_with_one_to_three_chunks(2) << " orders");
}

TEST_CASE("three blocks of two chunks: every order in which reads into the slots can end") {
  std::uint64_t orders = 0;
  for (std::uint32_t ahead = 0; ahead <= 2; ++ahead) {
    for (const std::uint32_t reads : {1U, 2U, 4U, 6U}) {
      World world = world_of(3, ahead, reads);
      world.in_place = true;
      orders += run_every_order(world);
    }
  }
  CHECK(orders > 1'000);
  WARN(orders << " orders");
}

TEST_CASE("every order, with a loop that may be late") {
  std::uint64_t orders = 0;
  for (std::uint32_t ahead = 0; ahead <= 1; ++ahead) {
    orders += run_every_order(world_of(2, ahead, 1), {}, true);
    World one_chunk = world_of(2, ahead, 2);
    one_chunk.images = plain_blocks({10, 10});
    orders += run_every_order(one_chunk, {}, true);
  }
  CHECK(orders > 100);
  WARN(orders << " orders");
}

TEST_CASE("two blocks of two chunks: every fault at every place in every order") {
  std::uint64_t orders = 0, faults = 0;
  for (const Fault kind : {Fault::read, Fault::short_read, Fault::device_call, Fault::block}) {
    for (std::uint64_t at = 0;; ++at) {
      const World world = world_of(2, 1, 2);
      Play counted{world, {kind, at}, [](std::size_t) { return std::size_t{0}; }};
      if (at >= counted.run().places) break;
      ++faults;
      orders += run_every_order(world, {kind, at});
    }
  }
  CHECK(faults > 50);
  WARN(faults << " faults, " << orders << " orders in all");
}

TEST_CASE("a fault at every place, in orders drawn at random, on every path of the bytes") {
  std::uint64_t runs = 0, errors = 0;
  std::mt19937 random{11};
  for (const int path : {0, 1, 2}) {
    for (const Fault kind : {Fault::read, Fault::short_read, Fault::device_call, Fault::block}) {
      for (std::uint32_t ahead = 0; ahead <= 2; ++ahead) {
        for (std::uint64_t at = 0, places = 1; at < places; ++at) {
          World world = world_of(4, ahead, 2 + static_cast<std::uint32_t>(random() % 2));
          world.images[2] = plain_block(0);  // a block without parameters is a block
          world.in_place = path == 1;
          world.in_ram = path == 2;
          world.linger = [&random] { return random() % 3 == 0; };
          for (int draw = 0; draw < 6; ++draw) {
            Play play{
                world, {kind, at}, [&random](std::size_t) { return std::size_t{random()}; }, true};
            UNSCOPED_INFO("path " << path << ", fault " << static_cast<int>(kind) << " at " << at
                                  << ", prefetch_ahead " << ahead << ", draw " << draw);
            const Outcome outcome = play.run();
            REQUIRE(outcome.wrong_looks == 0);
            REQUIRE(outcome.told_clearly);
            places = std::max(draw == 0 ? 0 : places, outcome.places);
            errors += outcome.errors;
            ++runs;
          }
        }
      }
    }
  }
  CHECK(errors > runs / 4);
  WARN(runs << " runs, " << errors << " of them with an error");
}
