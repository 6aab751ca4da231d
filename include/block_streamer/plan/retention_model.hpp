// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/plan/pass_costs.hpp>
#include <block_streamer/plan/slot_space.hpp>
#include <block_streamer/plan/visit_cycle.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace block_streamer::inline v1 {

/// Which visits of a cycle leave their part in its slot until its next visit. The others free it.
using Retention = std::vector<std::uint8_t>;

/// What a step costs in steady state.
struct StepCost {
  double seconds = 0;
  std::uint32_t fetches = 0;
  double fetch_seconds = 0;  ///< the sum over its fetches
};

/// @brief Plays a step over and over under a retention, until steps take equally long. A fetch
/// takes the slot that was free first, of the smallest class that has one; a slot freed by one of
/// the last `ahead` visits is not taken.
/// **Threads.** One at a time. **Cost.** O(visits x classes) a step, at most 8 steps.
class RetentionModel {
 public:
  RetentionModel(const VisitCycle& cycle, const PassCosts& costs, const SlotSpace& space,
                 std::uint32_t ahead)
      : ahead_{ahead}, queues_(space.class_count()) {
    for (std::uint32_t s = 0; s < space.slot_count(); ++s) ++queues_[space.class_of(s)].capacity;
    std::uint32_t blocks = 0;
    for (std::size_t i = 0; i < cycle.size(); ++i) {
      const PartId part = cycle.part(i);
      visits_.push_back({static_cast<std::uint32_t>(index_of(part.block)), space.class_of(part),
                         static_cast<std::uint32_t>(cycle.previous(i)), costs.of(part)});
      blocks = std::max(blocks, visits_.back().block + 1);
    }
    class_held_.resize(blocks);
    for (Queue& queue : queues_) queue.freed.resize(queue.capacity);
  }

  /// @brief nullopt: the retention leaves some fetch without a slot.
  [[nodiscard]] std::optional<StepCost> evaluate(const Retention& keep) {
    reset();
    StepCost cost;
    double before = 0;
    for (std::uint32_t step = 0; step < most_steps; ++step) {
      cost.fetches = 0;
      cost.fetch_seconds = 0;
      if (!play(keep, cost)) return std::nullopt;
      steps_[step] = end_ - before;
      before = end_;
      if (step >= 3 && equal(steps_[step], steps_[step - 1]) &&
          equal(steps_[step], steps_[step - 2])) {
        cost.seconds = steps_[step];
        return cost;
      }
    }
    constexpr std::uint32_t first = most_steps / 2;
    for (std::uint32_t i = first; i < most_steps; ++i) cost.seconds += steps_[i];
    cost.seconds /= most_steps - first;
    return cost;
  }

  /// @brief True if two lengths differ by rounding only.
  [[nodiscard]] static bool equal(double a, double b) noexcept {
    return std::abs(a - b) <= 1e-9 * (std::abs(a) + std::abs(b));
  }

 private:
  static constexpr std::uint32_t most_steps = 8;
  static constexpr std::uint32_t absent = std::numeric_limits<std::uint32_t>::max();

  struct Visit {
    std::uint32_t block;
    std::uint32_t least_class;
    std::uint32_t previous;
    BlockCost cost;
  };
  struct Freed {
    std::int64_t visit;
    double time;
  };
  /// Free slots of a class, the one freed first in front.
  struct Queue {
    std::uint32_t capacity = 0;
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    std::vector<Freed> freed;

    [[nodiscard]] const Freed& front() const noexcept { return freed[first]; }
    void pop() noexcept {
      first = (first + 1) % capacity;
      --count;
    }
    void push(Freed slot) noexcept {
      freed[(first + count) % capacity] = slot;
      ++count;
    }
  };

  void reset() {
    for (Queue& queue : queues_) {
      queue.first = 0;
      queue.count = queue.capacity;
      std::fill(queue.freed.begin(), queue.freed.end(),
                Freed{std::numeric_limits<std::int64_t>::min() / 2, 0});
    }
    std::fill(class_held_.begin(), class_held_.end(), absent);
    clock_ = {};
    end_ = 0;
    visit_ = 0;
  }
  /// One step. False if a fetch finds no slot.
  bool play(const Retention& keep, StepCost& cost) {
    for (std::size_t i = 0; i < visits_.size(); ++i, ++visit_) {
      const Visit& visit = visits_[i];
      double ready = 0;
      if (class_held_[visit.block] == absent) {
        Queue* const queue = slot_for(visit.least_class);
        if (queue == nullptr) return false;
        ready = clock_.fetch(queue->front().time, visit.cost);
        queue->pop();
        class_held_[visit.block] = static_cast<std::uint32_t>(queue - queues_.data());
        ++cost.fetches;
        cost.fetch_seconds += fetch_seconds(visit.cost);
      }
      end_ = std::max(end_, ready) + visit.cost.compute_s;
      if (keep[i] != 0) continue;
      queues_[class_held_[visit.block]].push({visit_, end_});
      class_held_[visit.block] = absent;
    }
    return true;
  }
  [[nodiscard]] Queue* slot_for(std::uint32_t least_class) noexcept {
    for (std::size_t c = least_class; c < queues_.size(); ++c) {
      Queue& queue = queues_[c];
      if (queue.count > 0 && queue.front().visit + ahead_ < visit_) return &queue;
    }
    return nullptr;
  }

  std::int64_t ahead_;
  std::vector<Visit> visits_;
  std::vector<Queue> queues_;              ///< by class
  std::vector<std::uint32_t> class_held_;  ///< by block: the class of the slot that holds it
  FetchClock clock_;
  double end_ = 0;
  std::int64_t visit_ = 0;
  double steps_[most_steps] = {};
};

}  // namespace block_streamer::inline v1
