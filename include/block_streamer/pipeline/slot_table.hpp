// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/pipeline/slot.hpp>
#include <block_streamer/trace/residency_history.hpp>
#include <block_streamer/trace/residency_observer.hpp>
#include <block_streamer/trace/statistics.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief All slots, with the one function that changes a slot's state: every change is checked,
/// counted and reported there.
/// **Threads.** Externally synchronised.
class SlotTable {
 public:
  SlotTable(std::uint32_t slot_count, ResidencyObserverRef observer)
      : slots_(slot_count), observer_{observer} {}

  [[nodiscard]] std::span<const Slot> all() const noexcept { return slots_; }
  [[nodiscard]] const Slot& operator[](std::uint32_t slot) const noexcept { return slots_[slot]; }
  /// @brief True if the part's bytes are usable there.
  [[nodiscard]] bool holds(std::uint32_t slot, PartId part) const noexcept {
    const Slot& held = slots_[slot];
    return held.part == part &&
           (held.state == Residency::resident || held.state == Residency::released);
  }

  /// @brief Puts a new part in the slot, whatever was there before. @throws ContractViolation if a
  /// visit still uses it.
  void begin_fetch(std::uint32_t slot, PartId part, std::uint64_t byte_count, std::uint64_t epoch) {
    clear(slot, epoch);
    slots_[slot].part = part;
    slots_[slot].byte_count = byte_count;
    move(slot, Residency::fetching, epoch);
    statistics.add_resident(byte_count);
  }
  /// @brief Forgets what the slot holds. @throws ContractViolation if a visit still uses it.
  void clear(std::uint32_t slot, std::uint64_t epoch) {
    if (slots_[slot].state == Residency::empty) return;
    move(slot, Residency::empty, epoch);
    statistics.remove_resident(slots_[slot].byte_count);
    slots_[slot].part.reset();
  }
  void move(std::uint32_t slot, Residency to, std::uint64_t epoch) {
    Slot& moved = slots_[slot];
    expects(may_follow(moved.state, to), "a slot made a move that its state does not allow");
    const Transition transition{sequence_++, *moved.part, moved.state, to, slot, epoch};
    moved.state = to;
    if (to == Residency::released) moved.release_epoch = epoch;
    history.observe(transition);
    observer_.observe(transition);
  }

  Statistics statistics;     ///< its gauges are kept here, its counters by whoever moves bytes
  ResidencyHistory history;  ///< the last transitions

 private:
  std::vector<Slot> slots_;
  ResidencyObserverRef observer_;
  std::uint64_t sequence_ = 0;
};

}  // namespace block_streamer::inline v1
