// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/simulation/makespan_bound.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
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

}  // namespace detail

/// @brief A forward and a backward in a run of many: plans as the pipeline makes them, what the
/// step before left resident, a link that copies a block at a time, a device that computes one. The
/// host costs nothing. @see makespan_bound
[[nodiscard]] inline StepBound step_bound(const bs::BlockImage& block, const StepLink& link,
                                          const StepParts& parts) {
  std::vector<bs::PartId> up, down;
  for (std::size_t i = 0; i < link.layers; ++i) up.push_back(bs::PartId{bs::block_at(i)});
  down.assign(up.rbegin(), up.rend());
  const bs::PlanOptions options{.prefetch_ahead = 1, .prefetch_next_pass = true};
  bs::SlotContents residency(link.slots);
  std::array<bs::PassWork, 2> step;
  for (int round = 0; round < 3; ++round) {  // until each step is like the one before
    step[0].plan = bs::plan_pass(up, down, residency, options);
    step[1].plan = bs::plan_pass(down, up, step[0].plan.residency, options);
    residency = step[1].plan.residency;
  }
  step[0].compute.assign(link.layers, detail::nanoseconds(parts.forward_s));
  step[1].compute.assign(link.layers, detail::nanoseconds(parts.backward_s));
  step[1].compute.front() += detail::nanoseconds(parts.head_s);

  const bs::ReadPlan copies = bs::plan_memory_copies(block, 0);
  bs::MakespanModel model;
  model.mode = bs::FetchMode::addressed;
  model.slot_count = link.slots;
  model.copy.bytes_per_s = static_cast<std::uint64_t>(link.link_bytes_per_s);
  model.one_tenant = false;
  model.pass_fork = false;
  const bs::Makespan bound =
      bs::makespan_bound(model, step, [&](bs::PartId) -> const bs::ReadPlan& { return copies; });
  return {static_cast<double>(bound.end.count()) * 1e-9 + parts.optimizer_s,
          step[0].plan.fetches.size() + step[1].plan.fetches.size()};
}

}  // namespace block_streamer_benchmarks
