// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/pipeline/fetch_queue.hpp>
#include <block_streamer/pipeline/ordering_rules.hpp>
#include <block_streamer/pipeline/slot_table.hpp>
#include <block_streamer/pipeline/ticket_pool.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/read_plan.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

namespace block_streamer::inline v1 {

/// How bytes reach a slot.
enum class FetchMode : std::uint8_t {
  staged,     ///< read into a page-locked chunk, copied from there; a part in the tier's
              ///< page-locked memory is copied from that, when it is its turn
  in_place,   ///< read into the slot itself (slots are host memory)
  addressed,  ///< copied from the tier's own page-locked memory: no read, no chunk
};

/// What the shell must do next.
struct FetchAction {
  enum class Kind : std::uint8_t {
    read,      ///< start the read of `chunk`; report arrived(ticket)
    copy,      ///< issue the copies out of the ticket's chunk; report copied(ticket), later
               ///< drained(ticket)
    copy_all,  ///< issue all copies of the part from the tier's memory; report copied_all(slot),
               ///< or copied(ticket) and drained(ticket) where other parts are staged
  };
  Kind kind = Kind::read;
  PartId part{};
  std::uint32_t slot = 0;
  std::uint32_t chunk = 0;
  std::uint32_t ticket = 0;
  const ReadPlan* reads = nullptr;
  bool wait_for_release =
      false;          ///< before it, the copy stream must wait for the slot's latest release
  bool last = false;  ///< after it, the part is complete in the order of the copy stream
  /// Before it, the copy stream must wait for what was computed before this pass; 0: it did.
  std::uint64_t fork_of_epoch = 0;
};

/// @brief The pipeline's logic as a sans-I/O state machine: events in, actions out, no thread,
/// clock or executor. Chunks are granted a ticket in plan order, and only once their slot's release
/// was issued; so every granted one drains without the caller, and nobody holds one ticket while
/// waiting for another: staging cannot deadlock.
/// **Threads.** Externally synchronised: the shell's mutex.
/// **Cost.** O(1) an event; no allocation once the largest pass was seen.
template <class Rules = AllOrderingRules>
class FetchMachine {
 public:
  FetchMachine(FetchMode mode, std::uint32_t slot_count, std::uint32_t ticket_count,
               ResidencyObserverRef observer = {})
      : slots{slot_count, observer}, mode_{mode}, tickets_{ticket_count} {
    expects(slot_count > 0 && ticket_count > 0, "a pipeline has a slot and room for a read");
  }

  /// @brief What each slot holds, or will hold once everything queued has arrived: where the next
  /// plan starts.
  [[nodiscard]] SlotContents expected() const {
    SlotContents contents;
    for (const Slot& slot : slots.all()) contents.push_back(slot.part);
    for (const Fetch& fetch : queue_.all()) {
      if (!fetch.begun && !fetch.dead) contents[fetch.slot] = fetch.part;
    }
    return contents;
  }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] bool failed() const noexcept { return failed_; }
  /// @brief Nothing in flight, and nothing that could be granted without the caller.
  [[nodiscard]] bool idle() noexcept { return tickets_.all_free() && !grantable(); }
  /// @brief Nothing in flight.
  [[nodiscard]] bool quiet() const noexcept { return tickets_.all_free(); }

  // ---- events of the visitor
  /// @brief A pass begins; its fetches queue behind those of earlier passes. `reads_of(part)`: a
  /// ReadPlan that outlives it.
  template <class ReadsOf>
  void begin_pass(const PassPlan& plan, ReadsOf&& reads_of) {
    queue_.trim();
    queue_.reserve(plan.fetches.size());  // nothing has changed if there is no memory
    ++epoch_;
    in_pass_ = true;
    released_ = 0;
    slots.statistics.passes += 1;
    for (const PlannedFetch& f : plan.fetches) {
      queue_.push({f.part, f.slot, f.after_visits, epoch_, &reads_of(f.part)});
    }
    // What failed since the caller looked may still be reading into the slots of these fetches.
    if (failed_) fail();
  }
  /// @brief True once the next visit's part is in its slot to stay. The slot may hold the same part
  /// from before, about to be replaced by a fetch that an earlier pass left behind: that is not it.
  /// **Cost.** linear in the fetches not begun.
  [[nodiscard]] bool usable(const PlannedVisit& visit) const noexcept {
    return slots.holds(visit.slot, visit.part) &&
           queue_.none_left([&](const Fetch& f) { return f.slot == visit.slot && open(f); });
  }
  void lease(const PlannedVisit& visit) {
    slots.move(visit.slot, Residency::leased, epoch_);
    slots.statistics.visits += 1;
  }
  /// @brief The visit's release was issued on the compute stream.
  void release(const PlannedVisit& visit) {
    slots.move(visit.slot, Residency::released, epoch_);
    ++released_;
  }
  /// @brief The pass is over, complete or not. Fetches that waited for visits which will not come
  /// are forgotten.
  void end_pass() {
    queue_.drop_unbegun([this](const Fetch& f) { return !open(f); });
    in_pass_ = false;
  }

  // ---- events of reads and copies
  /// @brief The ticket's read has ended well.
  void arrived(std::uint32_t ticket) {
    tickets_[ticket].state = Ticket::State::arrived;
    if (mode_ != FetchMode::in_place) return;
    take_from_window(ticket);
    Fetch& fetch = queue_[tickets_[ticket].fetch];
    tickets_.release(ticket);
    if (!fetch.dead) count_arrival(fetch);
  }
  /// @brief The ticket's copies were issued; `last` as in the action.
  void copied(std::uint32_t ticket) {
    Fetch& fetch = queue_[tickets_[ticket].fetch];
    if (!fetch.dead) count_arrival(fetch);
  }
  /// @brief The device has passed the ticket's copies.
  void drained(std::uint32_t ticket) { tickets_.release(ticket); }
  /// @brief All copies of the part in this slot were issued.
  void copied_all(std::uint32_t slot) {
    if (slots[slot].state != Residency::fetching) return;  // failed meanwhile
    slots.move(slot, Residency::resident, epoch_);
  }

  /// @brief Something failed: grants nothing more; what is in flight only returns its ticket. A
  /// ticket that failed itself is reported by arrived() too.
  void fail() {
    failed_ = true;
    for (Fetch& fetch : queue_.all()) {
      const bool on_its_way = fetch.begun && slots[fetch.slot].part == fetch.part &&
                              slots[fetch.slot].state == Residency::fetching;
      if (!fetch.complete() || on_its_way) fetch.dead = true;
    }
    // Of a part copied from RAM all chunks count as arrived before the copy was issued.
    for (std::uint32_t s = 0; s < slots.all().size(); ++s) {
      if (slots[s].state == Residency::fetching) slots.clear(s, epoch_);
    }
    queue_.finish_granting();
  }
  /// @brief Usable again after a failure. @pre quiet().
  void reset_failure() {
    expects(quiet(), "a failed pipeline is reset when nothing is in flight");
    queue_.clear();
    failed_ = false;
  }
  /// @brief Empties the slots that hold one of these parts. @pre idle(), no visit runs.
  void forget(std::span<const PartId> parts) {
    for (std::uint32_t s = 0; s < slots.all().size(); ++s) {
      const auto held = slots[s].part;
      if (held && std::ranges::find(parts, *held) != parts.end()) slots.clear(s, epoch_);
    }
  }
  /// @brief Empties every slot but those that hold what they are to keep. @pre idle(), no visit
  /// runs.
  void keep_only(const SlotContents& kept) {
    for (std::uint32_t s = 0; s < slots.all().size(); ++s) {
      if (slots[s].part && slots[s].part != kept[s]) slots.clear(s, epoch_);
    }
  }
  /// @brief A whole pass whose copies and visits were issued elsewhere, in the order of the plan.
  /// @pre mode addressed, idle(), what the plan begins with is there.
  template <class ReadsOf>
  void follow(const PassPlan& plan, ReadsOf&& reads_of) {
    begin_pass(plan, reads_of);
    const auto copy = [this] {
      while (const auto action = next_copy_all()) copied_all(action->slot);
    };
    copy();
    for (const PlannedVisit& visit : plan.visits) {
      lease(visit);
      release(visit);
      copy();
    }
    end_pass();
  }
  /// @brief Empties every slot. @pre quiet(), no visit runs.
  void evict_all() {
    queue_.clear();
    for (std::uint32_t s = 0; s < slots.all().size(); ++s) slots.clear(s, epoch_);
  }

  /// @brief The next thing to do, if any. Call again until there is none.
  [[nodiscard]] std::optional<FetchAction> next() {
    if (mode_ == FetchMode::addressed) return next_copy_all();
    if (mode_ == FetchMode::staged) {
      if (auto action = next_copy()) return action;
    }
    return next_read();
  }

  SlotTable slots;

 private:
  /// The slot was released, or its pass is over.
  [[nodiscard]] bool open(const Fetch& fetch) const noexcept {
    if (!Rules::begin_after_release) return true;
    return !in_pass_ || fetch.epoch != epoch_ || released_ >= fetch.after_visits;
  }
  [[nodiscard]] bool grantable() noexcept {
    const Fetch* fetch = queue_.to_grant();
    if (fetch == nullptr || !open(*fetch)) return false;
    // A fetch that nobody waits for any more may still be on its way into the slot; it drains
    // without the caller.
    return fetch->begun || slots[fetch->slot].state != Residency::fetching;
  }
  /// What was computed before the fetch's pass is ordered by the pass's fork; what came since, by
  /// the slot's event.
  [[nodiscard]] bool must_wait(const Fetch& fetch) const noexcept {
    return Rules::wait_for_release && slots[fetch.slot].release_epoch >= fetch.epoch;
  }

  /// A pass's fork goes in front of its own first copy, not of what an earlier pass asked for
  /// ahead: that may run while the earlier pass still computes.
  [[nodiscard]] std::uint64_t take_fork(const Fetch& fetch) noexcept {
    if (!Rules::fork_copies || fetch.epoch <= forked_epoch_) return 0;
    return forked_epoch_ = fetch.epoch;
  }

  void begin(Fetch& fetch) {
    slots.begin_fetch(fetch.slot, fetch.part, fetch.reads->needed_byte_count, epoch_);
    fetch.begun = true;
    slots.statistics.fetches += 1;
    slots.statistics.bytes_needed += fetch.reads->needed_byte_count;
    if (fetch.chunk_count() == 0) slots.move(fetch.slot, Residency::resident, epoch_);
  }
  void count_arrival(Fetch& fetch) {
    ++fetch.arrived;
    if (fetch.complete()) slots.move(fetch.slot, Residency::resident, epoch_);
  }

  std::optional<FetchAction> next_read() {
    while (grantable()) {
      Fetch& fetch = *queue_.to_grant();
      if (fetch.chunk_count() > 0 && !tickets_.any_free()) return std::nullopt;
      if (!fetch.begun) begin(fetch);
      if (fetch.granted == fetch.chunk_count()) {
        queue_.advance();
        continue;
      }
      const std::uint32_t chunk = fetch.granted++;
      const std::uint32_t ticket = tickets_.grant(queue_.cursor_id(), chunk);
      if (fetch.reads->in_memory) {  // nothing to read, but its copy waits for those before it
        tickets_[ticket].state = Ticket::State::arrived;
        queue_.advance();
        if (auto action = next_copy()) return action;
        continue;
      }
      slots.statistics.bytes_read += fetch.reads->chunks[chunk].image.byte_count;
      if (fetch.granted == fetch.chunk_count()) queue_.advance();
      return FetchAction{
          FetchAction::Kind::read, fetch.part, fetch.slot, chunk, ticket, fetch.reads};
    }
    return std::nullopt;
  }

  std::optional<FetchAction> next_copy() {
    const std::uint32_t reach = Rules::copy_in_plan_order ? 1 : tickets_.window_length();
    for (std::uint32_t i = 0; i < reach && i < tickets_.window_length();) {
      const std::uint32_t ticket = tickets_.waiting(i);
      if (tickets_[ticket].state != Ticket::State::arrived) {
        ++i;
        continue;
      }
      tickets_.take(i);
      Fetch& fetch = queue_[tickets_[ticket].fetch];
      if (!fetch.dead) return copy_action(fetch, ticket);
      tickets_.release(ticket);
    }
    return std::nullopt;
  }

  [[nodiscard]] static std::uint64_t copied_byte_count(const ReadPlan& reads, std::uint32_t chunk) {
    if (reads.in_memory) return reads.needed_byte_count;
    std::uint64_t byte_count = 0;
    for (const CopyPiece& piece : reads.pieces_of(reads.chunks[chunk]))
      byte_count += piece.byte_count;
    return byte_count;
  }
  FetchAction copy_action(const Fetch& fetch, std::uint32_t ticket) {
    Ticket& place = tickets_[ticket];
    place.state = Ticket::State::draining;
    slots.statistics.bytes_copied += copied_byte_count(*fetch.reads, place.chunk);
    return {fetch.reads->in_memory ? FetchAction::Kind::copy_all : FetchAction::Kind::copy,
            fetch.part,
            fetch.slot,
            place.chunk,
            ticket,
            fetch.reads,
            place.chunk == 0 && must_wait(fetch),
            place.chunk + 1 == fetch.chunk_count(),
            take_fork(fetch)};
  }

  std::optional<FetchAction> next_copy_all() {
    while (grantable()) {
      Fetch& fetch = *queue_.to_grant();
      begin(fetch);
      queue_.advance();
      fetch.granted = fetch.arrived = fetch.chunk_count();
      if (fetch.chunk_count() == 0) continue;
      slots.statistics.bytes_copied += fetch.reads->needed_byte_count;
      return FetchAction{FetchAction::Kind::copy_all,
                         fetch.part,
                         fetch.slot,
                         0,
                         0,
                         fetch.reads,
                         must_wait(fetch),
                         true,
                         take_fork(fetch)};
    }
    return std::nullopt;
  }

  void take_from_window(std::uint32_t ticket) {
    for (std::uint32_t i = 0; i < tickets_.window_length(); ++i) {
      if (tickets_.waiting(i) == ticket) return tickets_.take(i);
    }
  }

  FetchMode mode_;
  FetchQueue queue_;
  TicketPool tickets_;
  std::uint64_t epoch_ = 0;
  std::uint64_t forked_epoch_ = 0;  ///< the latest pass whose fork the copy stream waits for
  std::uint32_t released_ = 0;
  bool in_pass_ = false;
  bool failed_ = false;
};

}  // namespace block_streamer::inline v1
