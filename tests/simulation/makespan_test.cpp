// SPDX-License-Identifier: Apache-2.0
#include <support/catch.hpp>

#include <numeric>

#include "scenes.hpp"

namespace bs = block_streamer;
using namespace support;

TEST_CASE("one pass over equal blocks takes exactly as long as its slowest stage makes it") {
  constexpr std::size_t n = 9;
  for (const Regime& regime : regimes) {
    for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
      for (const std::uint32_t tickets : {2U, 3U, 4U, 8U, 64U}) {
        SimulatedScene scene = scene_of(regime, n);
        scene.ahead = ahead;
        scene.ticket_count = tickets;
        const SimulatedOutcome run = simulate(scene);
        INFO(regime.name << "-bound, prefetch_ahead " << ahead << ", " << tickets << " chunks");
        CHECK(run.wrong_looks == 0);
        CHECK(run.end == run.bound.end);
        CHECK(run.end == bound_of(scene, run, true).end);
        if (ahead > 0) {
          CHECK(run.end ==
                bs::equal_blocks_makespan({n, chunks, regime.read, regime.copy, regime.compute}));
        }
      }
    }
  }
}

namespace {

/// Says how far a run was from its bound, if it was.
void check_at_bound(const SimulatedScene& scene, const char* what) {
  const SimulatedOutcome run = simulate(scene);
  INFO(what << ", prefetch_ahead " << scene.ahead << ", " << scene.cached << " cached, "
            << run.ticket_count << " chunks, latency " << scene.drive.cost.latency.count()
            << " ns, mode " << static_cast<int>(run.mode));
  CHECK(run.wrong_looks == 0);
  CHECK(run.end.count() == run.bound.end.count());
  CHECK(run.peak_resident <= run.slot_count);
  std::uint64_t largest = 0;
  for (const bs::BlockImage& image : scene.images) largest = std::max(largest, slot_bytes(image));
  CHECK(std::accumulate(run.slot_byte_counts.begin(), run.slot_byte_counts.end(),
                        std::uint64_t{0}) <= (scene.ahead + 1 + scene.cached) * largest);
}

enum class Path { staged, from_ram, staged_on_host, in_place };

void check_training(Path path) {
  for (const Regime& regime : regimes) {
    for (const Nanoseconds latency : {0us, 7us}) {
      for_each_budget([&](std::uint32_t cached, std::uint32_t ahead, std::uint32_t tickets) {
        SimulatedScene scene = training_scene(regime, 3 + ahead);
        scene.drive.cost.latency = latency;
        scene.cached = cached;
        scene.ahead = ahead;
        scene.ticket_count = tickets;
        scene.in_ram = path == Path::from_ram;
        scene.computes_on_host = path == Path::staged_on_host || path == Path::in_place;
        scene.device.host_addressable = path == Path::in_place;
        check_at_bound(scene, regime.name);
      });
    }
  }
}

}  // namespace

TEST_CASE("training over unequal blocks is at the bound: staged onto a device") {
  check_training(Path::staged);
}
TEST_CASE("training over unequal blocks is at the bound: copied from RAM") {
  check_training(Path::from_ram);
}
TEST_CASE("training over unequal blocks is at the bound: the host computes on what was staged") {
  check_training(Path::staged_on_host);
}
TEST_CASE("training over unequal blocks is at the bound: read into the slots") {
  check_training(Path::in_place);
}

TEST_CASE("a drive that serves few reads at once, and a link with a cost per copy") {
  for (const Regime& regime : regimes) {
    for (const std::uint32_t depth : {1U, 2U, 5U}) {
      for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
        SimulatedScene scene = training_scene(regime, depth);
        scene.drive.cost.latency = 9us;
        scene.drive.depth = depth;
        scene.device.copy_in.latency = 2us;
        scene.ahead = ahead;
        check_at_bound(scene, regime.name);
      }
    }
  }
}

TEST_CASE("blocks of several segments with gaps, in chunks that cut through them") {
  for (const Regime& regime : regimes) {
    for (unsigned seed = 1; seed < 6; ++seed) {
      for (const std::uint64_t chunk : {100U, 777U, 1U << 16}) {
        SimulatedScene scene = training_scene(regime, seed);
        scene.images = odd_images(11, 1, seed);
        scene.chunk_byte_count = chunk;
        scene.ticket_count = 2 + seed;
        scene.ahead = seed % 4;
        check_at_bound(scene, regime.name);
      }
    }
  }
}

TEST_CASE(
    "b80 repeated passes: what is fetched ahead for the next pass overlaps the end of this one") {
  // Once everything overlaps, a further pass costs what its slowest stage needs, and no more.
  constexpr std::size_t n = 8;
  for (const Regime& regime : regimes) {
    for (const bool in_ram : {false, true}) {
      const auto time_of = [&](int passes) {
        SimulatedScene scene = scene_of(regime, n);
        scene.in_ram = in_ram;
        scene.ticket_count = 2 * chunks;
        const auto order = bs::ascending(0, n);
        scene.passes.assign(static_cast<std::size_t>(passes),
                            {order, order, [&](std::size_t) { return regime.compute; }});
        const SimulatedOutcome run = simulate(scene);
        CHECK(run.wrong_looks == 0);
        CHECK(run.end == run.bound.end);
        return run.end;
      };
      INFO(regime.name << (in_ram ? "-bound, from RAM" : "-bound"));
      const Nanoseconds read = in_ram ? 0us : regime.read;
      const Nanoseconds slowest =
          std::max<Nanoseconds>({chunks * read, chunks * regime.copy, regime.compute});
      CHECK(time_of(4) - time_of(3) == n * slowest);
    }
  }
}

TEST_CASE("what the pipeline's rules cost against a schedule that knows none") {
  // The rules: a slot has one tenant, and a pass's own copies follow what was computed before it.
  // Neither costs anything where blocks are equal, or nothing is cached and the drive answers at
  // once. The rest is what these tests keep an eye on.
  double worst = 1;
  for (const Regime& regime : regimes) {
    for (const Nanoseconds latency : {0us, 7us}) {
      for_each_budget([&](std::uint32_t cached, std::uint32_t ahead, std::uint32_t tickets) {
        SimulatedScene scene = training_scene(regime, 3);
        scene.drive.cost.latency = latency;
        scene.cached = cached;
        scene.ahead = ahead;
        scene.ticket_count = tickets;
        const SimulatedOutcome run = simulate(scene);
        const Nanoseconds free = bound_of(scene, run, true).end;
        if (cached == 0 && latency == 0us) CHECK(run.end == free);
        worst = std::max(worst,
                         static_cast<double>(run.end.count()) / static_cast<double>(free.count()));
      });
    }
  }
  CHECK(worst < 1.10);
  WARN("at most " << 100 * (worst - 1) << " % over 480 runs");
}
