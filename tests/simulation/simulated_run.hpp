// SPDX-License-Identifier: Apache-2.0
// Runs passes through the real pipeline in virtual time, and says what they should have taken.
#pragma once

#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/plan/visit_order.hpp>
#include <block_streamer/simulation/makespan_bound.hpp>
#include <block_streamer/simulation/recorded_trace.hpp>
#include <block_streamer/simulation/simulated_backend.hpp>
#include <block_streamer/simulation/simulated_storage.hpp>
#include <block_streamer/simulation/virtual_loop.hpp>

#include <pipeline/plain_images.hpp>
#include <pipeline/scripted_tier.hpp>

#include <functional>
#include <vector>

namespace support {
using namespace std::chrono_literals;
using bs::Nanoseconds;

/// One pass of a scene; `compute(block)` is how long a visit takes.
struct ScenePass {
  bs::VisitOrder order;
  bs::VisitOrder hint;
  std::function<Nanoseconds(std::size_t block)> compute;
};

struct SimulatedScene {
  std::vector<bs::BlockImage> images;
  std::uint64_t chunk_byte_count = 100;
  std::uint32_t ticket_count = 8;
  std::uint32_t ahead = 1;
  std::uint32_t cached = 0;  ///< the budget on top of ahead + 1 slots, in largest blocks
  bs::DriveModel drive{};
  bs::DeviceModel device{};
  bool in_ram = false;  ///< the tier is addressable
  bool computes_on_host = false;
  std::vector<ScenePass> passes;
};

struct SimulatedOutcome {
  Nanoseconds end{};
  std::size_t wrong_looks = 0;  ///< times that a kernel saw other bytes than the block's
  bs::RecordedTrace trace;
  bs::FetchMode mode{};
  std::uint32_t slot_count = 0;
  std::vector<std::uint64_t> slot_byte_counts;
  std::uint32_t ticket_count = 0;
  std::uint64_t peak_resident = 0;
  std::vector<bs::PassWork> work;
  bs::MakespanModel model;
  bs::Makespan bound;
};

/// How the pipeline reads a block of the scene.
[[nodiscard]] inline bs::ReadPlan reads_in(bs::FetchMode mode, const SimulatedScene& scene,
                                           std::size_t block) {
  const bs::BlockImage& image = scene.images[block];
  if (mode == bs::FetchMode::staged) return bs::plan_staged_reads(image, 0, scene.chunk_byte_count);
  return bs::plan_direct_reads(image, 0,
                               mode == bs::FetchMode::in_place
                                   ? scene.chunk_byte_count
                                   : std::max<std::uint64_t>(image.byte_count, 1));
}

/// The bound for what the pipeline was asked to do; `free` leaves its own rules out.
[[nodiscard]] inline bs::Makespan bound_of(const SimulatedScene& scene, const SimulatedOutcome& run,
                                           bool free = false) {
  bs::MakespanModel model = run.model;
  model.one_tenant = model.pass_fork = !free;
  std::vector<bs::ReadPlan> reads;
  for (std::size_t b = 0; b < scene.images.size(); ++b)
    reads.push_back(reads_in(run.mode, scene, b));
  return bs::makespan_bound(model, run.work, [&](bs::PartId part) -> const bs::ReadPlan& {
    return reads[bs::index_of(part.block)];
  });
}

/// Bytes of a slot for a block.
[[nodiscard]] inline std::uint64_t slot_bytes(const bs::BlockImage& image) {
  return std::max<std::uint64_t>(
      bs::round_up(image.layout.slot_byte_count[0], bs::tensor_alignment), 1);
}

[[nodiscard]] inline std::vector<bs::PassWork> plan_scene(const SimulatedScene& scene,
                                                          const std::vector<std::uint64_t>& slots,
                                                          std::uint32_t ahead) {
  bs::SlotContents contents(slots.size());
  std::vector<std::uint64_t> blocks;
  for (const bs::BlockImage& image : scene.images) blocks.push_back(slot_bytes(image));
  const bs::SlotSpace space{slots, blocks};
  std::vector<bs::PassWork> work;
  for (const ScenePass& pass : scene.passes) {
    bs::PassWork done{
        bs::plan_pass(pass.order, pass.hint, contents, {.prefetch_ahead = ahead}, space), {}};
    for (const bs::PartId part : pass.order) {
      done.compute.push_back(pass.compute(bs::index_of(part.block)));
    }
    contents = done.plan.residency;
    work.push_back(std::move(done));
  }
  return work;
}

/// Runs all passes one after another, as a visitor that never waits unless the pipeline makes it.
template <class Pipeline>
void visit_all(Pipeline& pipeline, bs::SimulatedBackend& backend, bs::VirtualClock& clock,
               const SimulatedScene& scene, SimulatedOutcome& outcome) {
  auto compute = backend.make_stream();
  for (const ScenePass& scene_pass : scene.passes) {
    auto pass = pipeline.begin_pass(scene_pass.order, scene_pass.hint, compute);
    while (!pass.done()) {
      const auto lease = pass.acquire();
      const std::size_t block = bs::index_of(lease.part().block);
      const auto look = [&outcome, &scene, block, bytes = lease.bytes()] {
        outcome.wrong_looks += slot_is_right(scene.images[block], block, bytes) ? 0 : 1;
      };
      if (scene.computes_on_host) {
        look();
        clock.advance(scene_pass.compute(block));
        look();
      } else {
        backend.compute(compute, lease.part(), scene_pass.compute(block), look);
      }
    }
  }
  pipeline.drain();
  auto over = backend.make_event();
  backend.record(over, compute);
  backend.synchronize(over);
}

[[nodiscard]] inline SimulatedOutcome simulate(const SimulatedScene& scene,
                                               bs::VirtualClock::Order order = {}) {
  SimulatedOutcome outcome;
  bs::VirtualClock clock{std::move(order)};
  bs::SimulatedBackend backend{clock, scene.device, outcome.trace};
  std::uint64_t largest = 0;
  for (const auto& image : scene.images)
    largest = std::max(largest, image.layout.slot_byte_count[0]);
  bs::PipelineOptions options;
  options.prefetch_ahead = scene.ahead;
  options.device_budget = scene.cached * bs::round_up(largest, bs::tensor_alignment);
  options.chunk_byte_count = scene.chunk_byte_count;
  options.staging_byte_count = scene.ticket_count * scene.chunk_byte_count;
  options.reads_in_flight = scene.ticket_count;
  options.computes_on_host = scene.computes_on_host;
  bs::AnyStorage tier = scene.in_ram
                            ? bs::AnyStorage{MemoryTier{scene.images}}
                            : bs::AnyStorage{bs::SimulatedStorage{clock, scene.images, scene.drive,
                                                                  fill_image, outcome.trace}};
  {
    bs::BlockPipeline<bs::SimulatedBackend, bs::VirtualLoop> pipeline{
        std::move(tier), backend, options, nullptr, std::make_unique<bs::VirtualLoop>(clock)};
    outcome.mode = pipeline.mode();
    outcome.slot_count = pipeline.slot_count();
    outcome.slot_byte_counts = pipeline.shape().slot_byte_counts;
    outcome.ticket_count = pipeline.shape().ticket_count;
    visit_all(pipeline, backend, clock, scene, outcome);
    outcome.end = clock.now();
    outcome.peak_resident = pipeline.statistics().peak_resident_blocks;
  }
  clock.run_dry();
  const auto ahead = std::min(scene.ahead, static_cast<std::uint32_t>(scene.images.size()) - 1);
  outcome.work = plan_scene(scene, outcome.slot_byte_counts, ahead);
  outcome.model = {outcome.mode,      outcome.slot_count,   outcome.ticket_count,  scene.drive.cost,
                   scene.drive.depth, scene.device.copy_in, scene.computes_on_host};
  outcome.bound = bound_of(scene, outcome);
  return outcome;
}

}  // namespace support
