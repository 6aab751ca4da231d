// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/plan/next_use.hpp>
#include <block_streamer/plan/retention_model.hpp>
#include <block_streamer/plan/slot_space.hpp>
#include <block_streamer/plan/visit_cycle.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// Which part each slot holds, or will hold once everything queued has arrived.
using SlotContents = std::vector<std::optional<PartId>>;

/// One visit of a pass: the part and the slot where it will be found.
struct PlannedVisit {
  PartId part{};
  std::uint32_t slot = 0;
};

/// One fetch: the part, the slot it replaces, and when that slot is free.
struct PlannedFetch {
  PartId part{};
  std::uint32_t slot = 0;
  std::uint32_t after_visits = 0;  ///< so many visits of this pass must have been released before
};

/// What a pass does. Fetches are in the order in which they are issued.
struct PassPlan {
  std::vector<PlannedVisit> visits;
  std::vector<PlannedFetch> fetches;
  std::uint32_t next_pass_fetches = 0;  ///< how many of the fetches serve the hinted next pass
  SlotContents residency;               ///< of every slot, once all fetches have arrived
};

struct PlanOptions {
  std::uint32_t prefetch_ahead = 1;
  bool prefetch_next_pass = true;  ///< fetch the first visits of the hint before this pass ends
};

namespace detail {

/// What is known of the step that a pass belongs to: which visits keep their part.
struct StepGuide {
  const VisitCycle& cycle;
  const Retention& keep;

  /// @param visit  counted from the pass's first.
  [[nodiscard]] bool keeps(std::size_t visit) const { return keep[cycle.position(visit)] != 0; }
  /// True if the part is to be found here when the pass begins, since an earlier visit kept it.
  [[nodiscard]] bool kept_before(PartId part) const {
    const auto at = cycle.last_before(cycle.position(0), part);
    return at && keep[*at] != 0;
  }
};

/// State of one planning run; a slot's last use counts visits of this pass and of the hint.
class PassPlanner {
 public:
  PassPlanner(std::span<const PartId> order, std::span<const PartId> hint,
              const SlotContents& residency, PlanOptions options, const SlotSpace& space,
              const StepGuide* guide = nullptr)
      : uses_{order, hint},
        options_{options},
        space_{space},
        guide_{guide},
        order_size_{order.size()},
        hint_size_{hint.size()} {
    plan_.residency = residency;
    plan_.visits.reserve(order.size());
    slots_.resize(residency.size());
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      const auto& part = residency[s];
      if (part) slots_[s].next_use = uses_.first(*part);
      slots_[s].dead = guide_ != nullptr ? !part || !guide_->kept_before(*part) : !part;
    }
  }

  PassPlan run() {
    for (std::size_t i = 0; i < order_size_; ++i) {
      const PartId part = uses_.part(i);
      std::uint32_t slot = holder_of(part);
      if (slot == slots_.size()) fetch(part, slot = victim_for(part, i));
      use(slot, i);
      plan_.visits.push_back({part, slot});
    }
    if (options_.prefetch_next_pass) prefetch();
    return std::move(plan_);
  }

 private:
  static constexpr std::int64_t never = -1;
  static constexpr std::uint32_t unused = NextUse::unused;

  struct SlotState {
    std::int64_t last_use = never;
    std::uint32_t next_use = unused;
    bool dead = false;  ///< nothing is lost with what it holds
  };

  /// The first fetches that the hint needs. Without a guide those of its first visits; with one as
  /// many as there are slots for, as long as nothing is lost by them.
  void prefetch() {
    if (options_.prefetch_ahead == 0) return;
    const std::size_t before = plan_.fetches.size();
    const std::size_t visits =
        guide_ == nullptr ? std::min<std::size_t>(options_.prefetch_ahead, hint_size_) : hint_size_;
    for (std::size_t i = order_size_; i < order_size_ + visits; ++i) {
      const PartId part = uses_.part(i);
      std::uint32_t slot = holder_of(part);
      if (slot == slots_.size()) {
        slot = victim_for(part, i);
        const SlotState& taken = slots_[slot];
        if (taken.last_use >= static_cast<std::int64_t>(order_size_)) break;
        if (guide_ != nullptr && !taken.dead) break;
        fetch(part, slot);
      }
      use(slot, i);
    }
    plan_.next_pass_fetches = static_cast<std::uint32_t>(plan_.fetches.size() - before);
  }

  void fetch(PartId part, std::uint32_t slot) {
    plan_.residency[slot] = part;
    latest_gate_ = static_cast<std::uint32_t>(slots_[slot].last_use + 1);
    plan_.fetches.push_back({part, slot, latest_gate_});
  }
  void use(std::uint32_t slot, std::size_t visit) {
    slots_[slot] = {static_cast<std::int64_t>(visit), uses_.next(visit),
                    guide_ != nullptr && !guide_->keeps(visit)};
  }

  [[nodiscard]] std::uint32_t holder_of(PartId part) const {
    std::uint32_t slot = 0;
    while (slot < plan_.residency.size() && plan_.residency[slot] != part) ++slot;
    return slot;
  }

  /// The best slot among those that take the part and are free early enough: the parts of the last
  /// `prefetch_ahead` visits stay, or the fetch could not run while they compute.
  [[nodiscard]] std::uint32_t victim_for(PartId part, std::size_t visit) const {
    std::optional<std::uint32_t> best;
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
      const std::int64_t last = slots_[slot].last_use;
      if (last != never && last + options_.prefetch_ahead >= static_cast<std::int64_t>(visit))
        continue;
      if (!space_.fits(slot, part)) continue;
      if (!best || better(slot, *best)) best = slot;
    }
    return best.value();  // there are at least prefetch_ahead + 1 slots that take every part
  }

  [[nodiscard]] bool better(std::uint32_t slot, std::uint32_t than) const {
    const SlotState &a = slots_[slot], &b = slots_[than];
    if (a.dead != b.dead) return a.dead;
    const std::uint32_t size = space_.class_of(slot), than_size = space_.class_of(than);
    if (a.dead) return size != than_size ? size < than_size : better_dead(a, b);
    if (a.next_use != b.next_use) return a.next_use > b.next_use;
    if (size != than_size) return size < than_size;
    return a.last_use < b.last_use;
  }
  /// Fetches begin in order, so slots that were free when the fetch before may begin are equally
  /// good; of others the one that is free first.
  [[nodiscard]] bool better_dead(const SlotState& a, const SlotState& b) const {
    const bool free = a.last_use < latest_gate_, than_free = b.last_use < latest_gate_;
    if (free != than_free) return free;
    if (!free) return a.last_use < b.last_use;
    return options_.prefetch_next_pass && a.next_use > b.next_use;
  }

  NextUse uses_;
  PlanOptions options_;
  const SlotSpace& space_;
  const StepGuide* guide_;
  std::size_t order_size_;
  std::size_t hint_size_;
  PassPlan plan_;
  std::vector<SlotState> slots_;
  std::uint32_t latest_gate_ = 0;  ///< after so many visits the latest fetch may begin
};

}  // namespace detail

/// @brief Plans a pass from the current residency: offline-optimal replacement (farthest next use)
/// for equal slots, and the same rule among the slots that a part fits into for others.
/// @param order      what the pass visits.
/// @param hint       what is expected to follow; steers retention and prefetch. A wrong hint costs
/// traffic, never correctness.
/// @param residency  per slot, what it holds or will hold.
/// @param space      which parts fit where.
/// @throws ContractViolation if there are fewer than prefetch_ahead + 1 slots that take every part.
/// **Cost.** O((V + H) log (V + H) + V·S) for V visits, H hinted visits and S slots; a few
/// allocations a pass. Source of the rule: Belady 1966; with prefetch, Cao, Felten, Karlin and Li,
/// SIGMETRICS 1995. @see ResidencyPlanner, which knows what blocks cost
[[nodiscard]] inline PassPlan plan_pass(std::span<const PartId> order, std::span<const PartId> hint,
                                        const SlotContents& residency, PlanOptions options,
                                        const SlotSpace& space) {
  expects(residency.size() == space.slot_count(), "a plan knows every slot");
  expects(space.largest_slot_count() > options.prefetch_ahead,
          "a plan needs prefetch_ahead + 1 slots that take every block");
  return detail::PassPlanner{order, hint, residency, options, space}.run();
}
/// @brief The same for equal slots.
[[nodiscard]] inline PassPlan plan_pass(std::span<const PartId> order, std::span<const PartId> hint,
                                        const SlotContents& residency, PlanOptions options) {
  return plan_pass(order, hint, residency, options,
                   SlotSpace{static_cast<std::uint32_t>(residency.size())});
}

}  // namespace block_streamer::inline v1
