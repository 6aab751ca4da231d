// SPDX-License-Identifier: Apache-2.0
// Passes over tiny blocks in memory with nothing computed: what is left is our own host time.
#pragma once

#include "../support/report.hpp"

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/trace/residency_observer.hpp>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

namespace bs = block_streamer;

inline constexpr std::size_t tiny_block_count = 36;
inline constexpr std::uint64_t tiny_block_bytes = 4096;

[[nodiscard]] inline bs::RamStorage tiny_blocks() {
  bs::BlockLayout layout;
  layout.tensors.push_back({{"w", bs::DType::u8, {tiny_block_bytes}}, 0, 0, tiny_block_bytes});
  layout.slot_byte_count = {tiny_block_bytes};
  bs::RamStorage storage{std::vector<bs::BlockLayout>(tiny_block_count, layout)};
  for (std::size_t b = 0; b < tiny_block_count; ++b)
    std::memset(storage.writable_bytes(bs::block_at(b)).data(), static_cast<int>(b) + 1,
                tiny_block_bytes);
  return storage;
}

struct TransitionCounter {
  std::uint64_t count = 0;
  void observe(const bs::Transition&) noexcept { ++count; }
};

/// @brief Host time of whole passes, waits for the device left out of it.
/// @param bare_s  seconds of the backend's own calls for one visit, for the note; 0: none.
template <class Backend>
void visit_tiny_blocks(benchmark::State& state, Report& report, const std::string& what,
                       Backend backend, double bare_s) {
  using Clock = std::chrono::steady_clock;
  TransitionCounter observer;
  bs::PipelineOptions options;
  options.observer = observer;
  auto compute = backend.make_stream();
  auto passed = backend.make_event();
  bs::BlockPipeline<Backend> pipeline{tiny_blocks(), backend, options};
  const bs::VisitOrder order = bs::ascending(0, tiny_block_count);
  std::vector<double> times;
  for ([[maybe_unused]] auto _ : state) {
    const auto begin = Clock::now();
    {
      auto pass = pipeline.begin_pass(order, order, compute);
      while (!pass.done()) {
        const auto lease = pass.acquire();
        benchmark::DoNotOptimize(lease.bytes().data());
      }
    }
    const double time = std::chrono::duration<double>(Clock::now() - begin).count();
    backend.record(passed, compute);
    backend.synchronize(passed);
    state.SetIterationTime(time);
    times.push_back(time);
  }
  const bs::Statistics statistics = pipeline.statistics();
  if (observer.count == 0 || pipeline.history().empty() ||
      statistics.fetches + 2 < statistics.visits) {
    throw std::runtime_error{"the passes did not stream, or nobody saw them"};
  }
  const double us = median(times) * 1e6 / tiny_block_count;
  state.counters["us_per_visit"] = us;
  report.add({"host time a visit, " + what, us, "us", 10.0, us / 10.0, at_most(1),
              bare_s == 0
                  ? std::string{}
                  : "of it the backend's calls alone " + std::to_string(bare_s * 1e6) + " us"});
}

/// @brief Median seconds of one visit's bare calls: two waits, a copy, two records, no thread, no
/// machine.
template <class Backend>
[[nodiscard]] double bare_calls_s(Backend backend) {
  using Clock = std::chrono::steady_clock;
  bs::RamStorage storage = tiny_blocks();
  std::vector<typename Backend::HostRegistration> locks;
  for (const auto& region : storage.regions()) {
    if (auto lock = backend.register_host(region)) locks.push_back(std::move(*lock));
  }
  const auto slot = backend.allocate_device(tiny_block_bytes);
  auto copies = backend.make_stream(), compute = backend.make_stream();
  auto ready = backend.make_event(), released = backend.make_event();
  backend.record(released, compute);
  std::vector<double> times;
  for (int round = 0; round < 50; ++round) {
    const auto begin = Clock::now();
    for (std::size_t b = 0; b < tiny_block_count; ++b) {
      backend.wait(copies, released);
      backend.copy_async(backend.bytes(slot), storage.bytes(bs::block_at(b)),
                         bs::CopyDirection::host_to_device, copies);
      backend.record(ready, copies);
      backend.wait(compute, ready);
      backend.record(released, compute);
    }
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    backend.synchronize(released);
  }
  return median(times) / tiny_block_count;
}

/// @brief Registers the case on CUDA device 0. Only where the build has CUDA.
void register_cuda_visits(Report& report);

}  // namespace block_streamer_benchmarks
