// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/slot_space.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// A pass that is done again and again with the same copies: it ends with everything in place that
/// it begins with.
struct RepeatedPlan {
  PassPlan plan;
  SlotContents kept;    ///< per slot, what is there before and is never replaced
  SlotContents begins;  ///< per slot, what must be there before: `kept`, and what it ends with
};

namespace detail {

/// Chooses what is kept, and lays the rest around a ring of ahead + 1 slots.
class RepeatedPlanner {
 public:
  RepeatedPlanner(std::span<const PartId> order, const SlotSpace& space, std::uint32_t ahead)
      : order_{order}, space_{space}, slot_of_visit_(order.size()) {
    plan_.kept.resize(space.slot_count());
    for (std::uint32_t slot = 0; slot < space.slot_count(); ++slot) {
      const bool takes_all = space.class_of(slot) + 1 == space.class_count();
      (takes_all && ring_.size() <= ahead ? ring_ : places_).push_back(slot);
    }
  }

  RepeatedPlan run() {
    choose_slots();
    plan_.begins = plan_.kept;
    begin();
    for (std::size_t i = 0; i < order_.size(); ++i) visit(i);
    return std::move(plan_);
  }
  /// There, and back down to the part at `last`.
  RepeatedPlan run_and_return(std::size_t last) {
    choose_slots();
    plan_.begins = plan_.kept;
    // The way back ends with what the way there begins with, if it comes by all of it.
    const auto first = std::ranges::find(in_turns_, true) - in_turns_.begin();
    std::size_t open = last <= static_cast<std::size_t>(first) ? ring_.size() : 0;
    for (std::size_t i = 0; i < order_.size() && open > 0; ++i) {
      if (!in_turns_[i]) continue;
      plan_.begins[slot_of_visit_[i].value()] = order_[i];
      --open;
    }
    begin();
    for (std::size_t i = 0; i < order_.size(); ++i) visit(i);
    for (std::size_t i = order_.size(); i > last; --i) visit(i - 1);
    return std::move(plan_);
  }

 private:
  /// Each part has a slot of its own, or shares one of the ring with every so many-th of the
  /// others: the same on the way back, so what was visited last on either way is found there again.
  void choose_slots() {
    keep();
    const auto left = std::count(slot_of_visit_.begin(), slot_of_visit_.end(), std::nullopt);
    if (static_cast<std::size_t>(left) <= ring_.size()) keep_in_ring();
    std::size_t turn = 0;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      in_turns_.push_back(!slot_of_visit_[i]);
      if (in_turns_[i]) slot_of_visit_[i] = ring_[turn++ % ring_.size()];
    }
  }
  void begin() {
    plan_.plan.residency = plan_.begins;
    free_after_.assign(plan_.kept.size(), 0);
  }
  void visit(std::size_t i) {
    const std::uint32_t slot = slot_of_visit_[i].value();
    std::optional<PartId>& held = plan_.plan.residency[slot];
    if (held != order_[i]) {
      plan_.plan.fetches.push_back({order_[i], slot, free_after_[slot]});
      held = order_[i];
    }
    plan_.plan.visits.push_back({order_[i], slot});
    free_after_[slot] = static_cast<std::uint32_t>(plan_.plan.visits.size());
  }
  /// From the largest places down: those of a class go to the parts that fill them, evenly over the
  /// order from its first on; what is left goes to smaller parts.
  void keep() {
    std::vector<std::uint32_t> open;
    for (std::uint32_t c = space_.class_count(); c-- > 0;) {
      for (const std::uint32_t slot : places_) {
        if (space_.class_of(slot) == c) open.push_back(slot);
      }
      std::vector<std::size_t> visits;
      for (std::size_t i = 0; i < order_.size(); ++i) {
        if (space_.class_of(order_[i]) == c) visits.push_back(i);
      }
      const std::size_t count = std::min(open.size(), visits.size());
      for (std::size_t k = 0; k < count; ++k) {
        put(visits[k * visits.size() / count], open.back());
        open.pop_back();
      }
    }
  }
  /// What is left has a slot each: nothing has to move.
  void keep_in_ring() {
    std::size_t next = 0;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (!slot_of_visit_[i] && next < ring_.size()) put(i, ring_[next++]);
    }
  }
  void put(std::size_t visit, std::uint32_t slot) {
    slot_of_visit_[visit] = slot;
    plan_.kept[slot] = order_[visit];
  }

  std::span<const PartId> order_;
  const SlotSpace& space_;
  std::vector<std::uint32_t> ring_;    ///< slots that take every part, used in turn
  std::vector<std::uint32_t> places_;  ///< the others
  std::vector<std::optional<std::uint32_t>> slot_of_visit_;
  std::vector<bool> in_turns_;             ///< per place in the order: shares its slot
  std::vector<std::uint32_t> free_after_;  ///< per slot, visits to wait for
  RepeatedPlan plan_;
};

}  // namespace detail

/// @brief Plans a pass whose copies are always the same: as many parts as there are slots beyond
/// prefetch_ahead + 1 stay, spread over the order; the others take turns in the rest. Farthest next
/// use would keep as many, but other ones each time. @see plan_pass
/// @param order  parts, each once.
/// @throws ContractViolation if there are fewer than prefetch_ahead + 1 slots that take every part.
/// **Cost.** O(V·C + S·C) for V visits, S slots and C classes of slots.
[[nodiscard]] inline RepeatedPlan plan_repeated(std::span<const PartId> order,
                                                const SlotSpace& space,
                                                std::uint32_t prefetch_ahead) {
  expects(space.largest_slot_count() > prefetch_ahead,
          "a plan needs prefetch_ahead + 1 slots that take every block");
  return detail::RepeatedPlanner{order, space, prefetch_ahead}.run();
}

/// @brief The same for a pass that goes through the order and then back down to the part at `last`,
/// as a training step does: what lies in the slots at the turn serves the way back, and where that
/// comes down to the first part that is fetched at all, what lies in them at its end serves the
/// next way there.
/// @param order  parts, each once.
[[nodiscard]] inline RepeatedPlan plan_repeated_return(std::span<const PartId> order,
                                                       std::size_t last, const SlotSpace& space,
                                                       std::uint32_t prefetch_ahead) {
  expects(space.largest_slot_count() > prefetch_ahead,
          "a plan needs prefetch_ahead + 1 slots that take every block");
  expects(last <= order.size(), "a pass returns to a part of its order");
  return detail::RepeatedPlanner{order, space, prefetch_ahead}.run_and_return(last);
}

}  // namespace block_streamer::inline v1
