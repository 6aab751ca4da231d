// SPDX-License-Identifier: Apache-2.0
// What the simulation tests run: machines that are slow in one place or in none, equal and unequal
// blocks, inference and training.
#pragma once

#include "simulated_run.hpp"

namespace support {

/// The rate at which a chunk of 100 bytes takes so long.
inline bs::TransferCost chunk_takes(Nanoseconds time, Nanoseconds latency = {}) {
  return {static_cast<std::uint64_t>(100 * 1s / time), latency};
}

struct Regime {
  const char* name;
  Nanoseconds read, copy, compute;  ///< read and copy: a chunk of 100 bytes; compute: a block
};
inline constexpr std::size_t chunks = 4;
inline constexpr Regime regimes[] = {{"read", 10us, 4us, 12us},
                                     {"link", 4us, 10us, 12us},
                                     {"compute", 4us, 5us, 50us},
                                     {"balanced", 10us, 10us, 40us}};

inline SimulatedScene scene_of(const Regime& regime, std::size_t blocks) {
  SimulatedScene scene;
  scene.images = plain_blocks(std::vector<std::uint64_t>(blocks, chunks * 100));
  scene.drive.cost = chunk_takes(regime.read);
  scene.device.copy_in = chunk_takes(regime.copy);
  scene.passes = {
      {bs::ascending(0, blocks), {}, [&regime](std::size_t) { return regime.compute; }}};
  return scene;
}

inline std::vector<std::uint64_t> unequal_sizes(std::size_t blocks, unsigned seed) {
  std::mt19937 random{seed};
  std::vector<std::uint64_t> sizes;
  for (std::size_t b = 0; b < blocks; ++b) sizes.push_back(random() % 7 == 0 ? 0 : random() % 900);
  return sizes;
}

/// Steps of a LoRA training over the upper blocks, each followed by the next; computing differs by
/// block, and the backward computes twice.
inline std::vector<ScenePass> lora_steps(std::size_t blocks, std::size_t lowest,
                                         Nanoseconds compute, int steps) {
  const auto forward = bs::ascending(0, blocks), backward = bs::descending(lowest, blocks);
  const auto time = [compute](std::size_t b) { return compute + static_cast<int>(b % 3) * 1us; };
  std::vector<ScenePass> passes;
  for (int step = 0; step < steps; ++step) {
    passes.push_back({forward, bs::joined(backward, forward), time});
    passes.push_back(
        {backward, bs::joined(forward, backward), [time](std::size_t b) { return 2 * time(b); }});
  }
  return passes;
}

/// Unequal blocks, some without a byte, in training steps.
inline SimulatedScene training_scene(const Regime& regime, unsigned seed) {
  SimulatedScene scene = scene_of(regime, 11);
  scene.images = plain_blocks(unequal_sizes(11, seed));
  scene.passes = lora_steps(11, 5, regime.compute, 2);
  return scene;
}

template <class Visit>
void for_each_budget(Visit visit) {
  for (const std::uint32_t cached : {0U, 3U}) {
    for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
      for (const std::uint32_t tickets : {1U, 2U, 3U, 8U, 40U}) visit(cached, ahead, tickets);
    }
  }
}

}  // namespace support
