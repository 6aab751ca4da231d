// SPDX-License-Identifier: Apache-2.0
#include <support/catch.hpp>

#include <iostream>

#include "simulated_run.hpp"

namespace bs = block_streamer;
using namespace support;

namespace {

/// Rates that make a chunk of 1000 bytes take so many microseconds.
bs::TransferCost chunk_takes(Nanoseconds time, Nanoseconds latency = {}) {
  return {static_cast<std::uint64_t>(1000 * 1s / time), latency};
}

struct Regime {
  const char* name;
  Nanoseconds read, copy, compute;  ///< read and copy: a chunk of 1000 bytes; compute: a block
};
constexpr std::size_t chunks = 4;
const Regime regimes[] = {{"read", 10us, 4us, 12us},
                          {"link", 4us, 10us, 12us},
                          {"compute", 4us, 5us, 50us},
                          {"balanced", 10us, 10us, 40us}};

SimulatedScene scene_of(const Regime& regime, std::size_t blocks) {
  SimulatedScene scene;
  scene.images = plain_blocks(std::vector<std::uint64_t>(blocks, chunks * 1000));
  scene.drive.cost = chunk_takes(regime.read);
  scene.device.copy_in = chunk_takes(regime.copy);
  scene.passes = {{bs::ascending(0, blocks), {}, [&regime](std::size_t) { return regime.compute; }}};
  return scene;
}

}  // namespace

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
          CHECK(run.end == bs::equal_blocks_makespan(
                               {n, chunks, regime.read, regime.copy, regime.compute}));
        }
      }
    }
  }
}

namespace {

std::vector<std::uint64_t> unequal_sizes(std::size_t blocks, unsigned seed) {
  std::mt19937 random{seed};
  std::vector<std::uint64_t> sizes;
  for (std::size_t b = 0; b < blocks; ++b) sizes.push_back(random() % 7 == 0 ? 0 : random() % 9000);
  return sizes;
}

/// Steps of a LoRA training over the upper blocks, each followed by the next; computing differs by
/// block, and the backward computes twice.
std::vector<ScenePass> lora_steps(std::size_t blocks, std::size_t lowest, Nanoseconds compute,
                                  int steps) {
  const auto forward = bs::ascending(0, blocks), backward = bs::descending(lowest, blocks);
  const auto time = [compute](std::size_t b) { return compute + static_cast<int>(b % 3) * 1us; };
  std::vector<ScenePass> passes;
  for (int step = 0; step < steps; ++step) {
    passes.push_back({forward, bs::joined(backward, forward), time});
    passes.push_back({backward, bs::joined(forward, backward),
                      [time](std::size_t b) { return 2 * time(b); }});
  }
  return passes;
}

std::string describe(const SimulatedScene& scene, const SimulatedOutcome& run) {
  const auto us = [](Nanoseconds t) { return std::to_string(static_cast<double>(t.count()) / 1e3); };
  return "ahead " + std::to_string(scene.ahead) + ", cached " + std::to_string(scene.cached) +
         ", tickets " + std::to_string(run.ticket_count) + ", mode " +
         std::to_string(static_cast<int>(run.mode)) + ": " + us(run.end) + " us, bound " +
         us(run.bound.end) + ", free of rules " + us(bound_of(scene, run, true).end);
}

}  // namespace

TEST_CASE("explore") {
  for (const Regime& regime : regimes) {
    for (const int kind : {0, 1, 2, 3}) {
      for (const std::uint32_t cached : {0U, 3U}) {
        for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
          for (const std::uint32_t tickets : {1U, 2U, 3U, 8U, 40U}) {
            for (const Nanoseconds latency : {0us, 7us}) {
              SimulatedScene scene = scene_of(regime, 11);
              scene.images = plain_blocks(unequal_sizes(11, 3));
              scene.drive.cost.latency = latency;
              scene.passes = lora_steps(11, 5, regime.compute, 2);
              scene.cached = cached;
              scene.ahead = ahead;
              scene.ticket_count = tickets;
              if (kind == 1) scene.in_ram = true;
              if (kind == 2) scene.computes_on_host = true;
              if (kind == 3) scene.computes_on_host = scene.device.host_addressable = true;
              const SimulatedOutcome run = simulate(scene);
              CHECK(run.wrong_looks == 0);
              if (run.end != run.bound.end || run.end != bound_of(scene, run, true).end) std::cout << regime.name << " kind " << kind << " latency " << latency.count() << " " << describe(scene, run) << "\n";
            }
          }
        }
      }
    }
  }
}
