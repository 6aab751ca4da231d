// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/plan/next_use.hpp>

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

/// State of one planning run; a slot's last use counts visits of this pass and of the hint.
class PassPlanner {
 public:
  PassPlanner(std::span<const PartId> order, std::span<const PartId> hint,
              const SlotContents& residency, PlanOptions options)
      : uses_{order, hint}, options_{options} {
    plan_.residency = residency;
    plan_.visits.reserve(order.size());
    last_use_.assign(residency.size(), never);
    for (const auto& part : residency) next_use_.push_back(part ? uses_.first(*part) : unused);
  }

  PassPlan run(std::size_t order_size, std::size_t hint_size) {
    for (std::size_t i = 0; i < order_size; ++i) {
      plan_.visits.push_back({uses_.part(i), place(static_cast<std::int64_t>(i))});
    }
    const std::size_t pass_fetches = plan_.fetches.size();
    const std::size_t ahead = options_.prefetch_next_pass ? options_.prefetch_ahead : 0;
    for (std::size_t i = order_size; i < order_size + std::min(ahead, hint_size); ++i) {
      place(static_cast<std::int64_t>(i));
    }
    plan_.next_pass_fetches = static_cast<std::uint32_t>(plan_.fetches.size() - pass_fetches);
    return std::move(plan_);
  }

 private:
  static constexpr std::int64_t never = -1;
  static constexpr std::uint32_t unused = NextUse::unused;

  /// The slot where the visit finds its part, fetched into it if it is not resident.
  std::uint32_t place(std::int64_t visit) {
    const PartId part = uses_.part(static_cast<std::size_t>(visit));
    std::uint32_t slot = holder_of(part);
    if (slot == plan_.residency.size()) {
      slot = victim_for(visit);
      plan_.residency[slot] = part;
      plan_.fetches.push_back({part, slot, static_cast<std::uint32_t>(last_use_[slot] + 1)});
    }
    last_use_[slot] = visit;
    next_use_[slot] = uses_.next(static_cast<std::size_t>(visit));
    return slot;
  }

  [[nodiscard]] std::uint32_t holder_of(PartId part) const {
    std::uint32_t slot = 0;
    while (slot < plan_.residency.size() && plan_.residency[slot] != part) ++slot;
    return slot;
  }

  /// Farthest next use among the slots that are free early enough: the parts of the last
  /// `prefetch_ahead` visits stay, or the fetch could not run while they compute. Ties go to the
  /// slot that is free first.
  [[nodiscard]] std::uint32_t victim_for(std::int64_t visit) const {
    std::optional<std::uint32_t> best;
    for (std::uint32_t slot = 0; slot < plan_.residency.size(); ++slot) {
      if (last_use_[slot] != never && last_use_[slot] + options_.prefetch_ahead >= visit) continue;
      if (!best || better(slot, *best)) best = slot;
    }
    return best.value();  // there are at least prefetch_ahead + 1 slots
  }

  [[nodiscard]] bool better(std::uint32_t slot, std::uint32_t than) const {
    const bool empty = !plan_.residency[slot], than_empty = !plan_.residency[than];
    if (empty != than_empty) return empty;
    if (next_use_[slot] != next_use_[than]) return next_use_[slot] > next_use_[than];
    return last_use_[slot] < last_use_[than];
  }

  NextUse uses_;
  PlanOptions options_;
  PassPlan plan_;
  std::vector<std::int64_t> last_use_;
  std::vector<std::uint32_t> next_use_;
};

}  // namespace detail

/// @brief Plans a pass from the current residency: offline-optimal replacement (farthest next use)
/// for equal slots.
/// @param order      what the pass visits.
/// @param hint       what is expected to follow; steers retention and prefetch. A wrong hint costs
/// traffic, never correctness.
/// @param residency  per slot, what it holds or will hold.
/// @throws ContractViolation if there are fewer than prefetch_ahead + 1 slots.
/// **Cost.** O((V + H) log (V + H) + V·S) for V visits, H hinted visits and S slots; a few
/// allocations a pass. Source of the rule: Belady 1966; with prefetch, Cao, Felten, Karlin and Li,
/// SIGMETRICS 1995.
[[nodiscard]] inline PassPlan plan_pass(std::span<const PartId> order, std::span<const PartId> hint,
                                        const SlotContents& residency, PlanOptions options) {
  expects(residency.size() > options.prefetch_ahead, "a plan needs prefetch_ahead + 1 slots");
  return detail::PassPlanner{order, hint, residency, options}.run(order.size(), hint.size());
}

}  // namespace block_streamer::inline v1
