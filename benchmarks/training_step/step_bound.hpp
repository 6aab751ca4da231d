// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/simulation/makespan_bound.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace block_streamer_benchmarks {

namespace bs = block_streamer;

/// What a training step is made of, measured with all weights resident.
struct StepParts {
  double forward_s = 0;    ///< of one block
  double backward_s = 0;   ///< of one block, its second forward included
  double head_s = 0;       ///< norm, head, loss, and back to the hidden state
  double optimizer_s = 0;  ///< after the backward

  [[nodiscard]] double compute_s(std::size_t layers) const {
    return static_cast<double>(layers) * (forward_s + backward_s) + head_s + optimizer_s;
  }
};

/// The machine of the bound.
struct StepLink {
  std::size_t layers = 0;
  std::uint32_t slots = 2;
  double link_bytes_per_s = 0;
  bool keeps_residency = true;  ///< false: a step begins with nothing resident, its masters changed
};

/// What leaves the device in a backward, block by block, and what the host does with it.
struct GradientExitTimes {
  double copy_out_s = 0;  ///< of one block's gradients
  double update_s = 0;    ///< the optimizer's time for one block
};

/// The least time of a step and how many blocks it moves.
struct StepBound {
  double time_s = 0;
  std::uint64_t fetches = 0;
};

namespace detail {

[[nodiscard]] inline bs::Nanoseconds nanoseconds(double seconds) {
  return bs::Nanoseconds{std::llround(seconds * 1e9)};
}
[[nodiscard]] inline double seconds(bs::Nanoseconds time) {
  return static_cast<double>(time.count()) * 1e-9;
}

/// A forward and a backward in a run of many, with the plans that the pipeline makes.
[[nodiscard]] inline std::array<bs::PassWork, 2> step_work(const StepLink& link,
                                                           const StepParts& parts) {
  std::vector<bs::PartId> up;
  for (std::size_t i = 0; i < link.layers; ++i) up.push_back(bs::PartId{bs::block_at(i)});
  const std::vector<bs::PartId> down(up.rbegin(), up.rend());
  const bs::PlanOptions options{.prefetch_ahead = 1, .prefetch_next_pass = link.keeps_residency};
  const bs::SlotContents nothing(link.slots);
  bs::SlotContents residency = nothing;
  std::array<bs::PassWork, 2> step;
  for (int round = 0; round < 3; ++round) {  // until each step is like the one before
    step[0].plan = bs::plan_pass(up, down, residency, options);
    step[1].plan = bs::plan_pass(down, up, step[0].plan.residency, options);
    residency = link.keeps_residency ? step[1].plan.residency : nothing;
  }
  step[0].compute.assign(link.layers, nanoseconds(parts.forward_s));
  step[1].compute.assign(link.layers, nanoseconds(parts.backward_s));
  step[1].compute.front() += nanoseconds(parts.head_s);
  return step;
}

[[nodiscard]] inline bs::Makespan makespan_of(const bs::BlockImage& block, const StepLink& link,
                                              std::span<const bs::PassWork> step) {
  const bs::ReadPlan copies = bs::plan_memory_copies(block, 0);
  bs::MakespanModel model;
  model.mode = bs::FetchMode::addressed;
  model.slot_count = link.slots;
  model.copy.bytes_per_s = static_cast<std::uint64_t>(link.link_bytes_per_s);
  model.one_tenant = false;
  model.pass_fork = false;
  return bs::makespan_bound(model, step, [&](bs::PartId) -> const bs::ReadPlan& { return copies; });
}

}  // namespace detail

/// @brief A step whose gradients stay where they are. A link that copies a block at a time, a
/// device that computes one; the host costs nothing. @see makespan_bound
[[nodiscard]] inline StepBound step_bound(const bs::BlockImage& block, const StepLink& link,
                                          const StepParts& parts) {
  const auto step = detail::step_work(link, parts);
  return {detail::seconds(detail::makespan_of(block, link, step).end) + parts.optimizer_s,
          step[0].plan.fetches.size() + step[1].plan.fetches.size()};
}

/// @brief A step whose gradients leave block by block, on a link of their own, and are consumed by
/// the host, a block at a time.
[[nodiscard]] inline StepBound full_step_bound(const bs::BlockImage& block, const StepLink& link,
                                               const StepParts& parts,
                                               const GradientExitTimes& exit) {
  const auto step = detail::step_work(link, parts);
  const bs::Makespan makespan = detail::makespan_of(block, link, step);
  double out = 0, updated = 0;
  for (std::size_t i = link.layers; i < 2 * link.layers; ++i) {
    out = std::max(out, detail::seconds(makespan.computes[i].end)) + exit.copy_out_s;
    updated = std::max(updated, out) + exit.update_s;
  }
  return {std::max(detail::seconds(makespan.end), updated),
          step[0].plan.fetches.size() + step[1].plan.fetches.size()};
}

}  // namespace block_streamer_benchmarks
