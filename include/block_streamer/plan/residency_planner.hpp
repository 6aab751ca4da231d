// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/plan/pass_costs.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/retention.hpp>
#include <block_streamer/plan/slot_space.hpp>
#include <block_streamer/plan/visit_cycle.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Plans the passes of one arena. Knowing what blocks cost, it finds the step that a pass
/// and its hint repeat, chooses once what stays resident in it (@see choose_retention) and then
/// plans each pass towards that; from the second step on, a step ends as it began. Not knowing it,
/// or where nothing repeats, each pass is planned by farthest next use (@see plan_pass).
/// **Threads.** One at a time.
/// **Cost.** As plan_pass; a step that is new costs a search, and the last few steps are
/// remembered.
class ResidencyPlanner {
 public:
  /// @throws ContractViolation if fewer than prefetch_ahead + 1 slots take every part.
  ResidencyPlanner(SlotSpace space, PlanOptions options, std::optional<PassCosts> costs = {})
      : space_{std::move(space)}, options_{options}, costs_{std::move(costs)} {
    expects(space_.largest_slot_count() > options_.prefetch_ahead,
            "a plan needs prefetch_ahead + 1 slots that take every block");
  }

  /// @brief Does the search that `plan` of the same visits would do first: before a lock is taken.
  void prepare(std::span<const PartId> order, std::span<const PartId> hint) {
    if (!costs_) return;
    if (const auto cycle = VisitCycle::of(order, hint)) static_cast<void>(retention_of(*cycle));
  }

  /// @param residency  per slot, what it holds or will hold. @see plan_pass
  [[nodiscard]] PassPlan plan(std::span<const PartId> order, std::span<const PartId> hint,
                              const SlotContents& residency) {
    expects(residency.size() == space_.slot_count(), "a plan knows every slot");
    if (costs_) {
      if (const auto cycle = VisitCycle::of(order, hint)) {
        const detail::StepGuide guide{*cycle, retention_of(*cycle).keep};
        return detail::PassPlanner{order, hint, residency, options_, space_, &guide}.run();
      }
    }
    return detail::PassPlanner{order, hint, residency, options_, space_}.run();
  }

  /// @brief What a step of these visits will cost in steady state; nullopt without costs.
  [[nodiscard]] std::optional<StepCost> expected(const VisitCycle& cycle) {
    if (!costs_) return std::nullopt;
    return retention_of(cycle).cost;
  }

 private:
  static constexpr std::size_t most_remembered = 4;

  struct Known {
    std::vector<PartId> visits;
    ChosenRetention chosen;
  };

  const ChosenRetention& retention_of(const VisitCycle& cycle) {
    const auto known = std::find_if(known_.begin(), known_.end(), [&](const Known& k) {
      return std::equal(k.visits.begin(), k.visits.end(), cycle.visits().begin(),
                        cycle.visits().end());
    });
    if (known != known_.end()) return known->chosen;
    if (known_.size() == most_remembered) known_.erase(known_.begin());
    const auto chosen = choose_retention(cycle, *costs_, space_, options_.prefetch_ahead);
    known_.push_back({{cycle.visits().begin(), cycle.visits().end()}, chosen.value()});
    return known_.back().chosen;
  }

  SlotSpace space_;
  PlanOptions options_;
  std::optional<PassCosts> costs_;
  std::vector<Known> known_;
};

}  // namespace block_streamer::inline v1
