// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/simulation/transfer_cost.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// One pass: its plan and how long each of its visits computes.
struct PassWork {
  PassPlan plan;
  std::vector<Nanoseconds> compute;
};

/// The machine that a bound is asked for, and which rules of the pipeline the bound grants it.
struct MakespanModel {
  FetchMode mode = FetchMode::staged;
  std::uint32_t slot_count = 2;
  std::uint32_t ticket_count = 2;  ///< staging chunks, or reads in flight
  TransferCost read;
  std::uint32_t drive_depth = 32;
  TransferCost copy;
  bool computes_on_host = false;  ///< the visitor itself computes
  /// A slot has one tenant: no byte of the next part is asked for before the caller has issued the
  /// release of the part before. False: only the bytes must not meet.
  bool one_tenant = true;
  /// A pass's own copies come after everything that was computed before the pass. False: only after
  /// what was computed in their slot.
  bool pass_fork = true;
};

/// When something was under way.
struct Interval {
  Nanoseconds begin{};
  Nanoseconds end{};
  friend bool operator==(const Interval&, const Interval&) = default;
};

/// The earliest schedule: every stage begins each of its operations as soon as it is free, its
/// input is there and there is room.
struct Makespan {
  Nanoseconds end{};
  std::vector<Interval> reads;     ///< on the drive, in plan order
  std::vector<Interval> copies;    ///< by chunk, or by part for a tier in RAM
  std::vector<Interval> computes;  ///< by visit
};

namespace detail {

/// The recurrence behind makespan_bound: one walk over fetches and visits in plan order.
template <class ReadsOf>
class MakespanRecurrence {
 public:
  MakespanRecurrence(const MakespanModel& model, ReadsOf reads_of)
      : model_{model}, reads_of_{reads_of}, slots_(model.slot_count) {}

  void pass(const PassWork& work) {
    expects(work.compute.size() == work.plan.visits.size(), "each visit computes for some time");
    begin_ = visitor_;
    fork_ = computed_;
    released_.clear();
    for (const PlannedFetch& fetch : work.plan.fetches) {
      while (released_.size() < fetch.after_visits) visit(work);
      this->fetch(fetch);
    }
    while (released_.size() < work.plan.visits.size()) visit(work);
  }
  Makespan take() {
    for (const auto* stage : {&result_.copies, &result_.computes}) {
      if (!stage->empty()) result_.end = std::max(result_.end, stage->back().end);
    }
    if (!result_.reads.empty()) result_.end = std::max(result_.end, result_.reads.back().end);
    return std::move(result_);
  }

 private:
  struct Slot {
    Nanoseconds issued{};    ///< its part's last copy was issued: the visitor may go on
    Nanoseconds ready{};     ///< its part is there
    Nanoseconds computed{};  ///< its latest visit is over
  };

  void fetch(const PlannedFetch& fetch) {
    Slot& slot = slots_[fetch.slot];
    const Nanoseconds released =
        fetch.after_visits == 0 ? begin_ : std::max(begin_, released_[fetch.after_visits - 1]);
    const bool in_place = model_.mode == FetchMode::in_place;
    Nanoseconds gate = model_.one_tenant ? released : begin_;
    if (in_place) gate = std::max(gate, slot.computed);
    const Nanoseconds room =
        in_place ? Nanoseconds{}
                 : std::max(slot.computed, model_.pass_fork ? fork_ : Nanoseconds{});
    const ReadPlan& reads = reads_of_(fetch.part);
    granted_ = std::max(granted_, gate);
    slot.issued = slot.ready = granted_;  // and that is all for a part without bytes
    if (model_.mode == FetchMode::addressed) return copy_part(slot, reads, room);
    for (const Chunk& chunk : reads.chunks) {
      const Nanoseconds there = read(chunk.image.byte_count);
      if (in_place) {
        slot.issued = slot.ready = std::max(slot.ready, there);
      } else {
        copy_chunk(slot, there, room, reads.pieces_of(chunk));
      }
    }
  }
  /// Tickets are granted in plan order, and reads end in it.
  Nanoseconds read(std::uint64_t byte_count) {
    const std::size_t k = result_.reads.size();
    const auto& freed = model_.mode == FetchMode::in_place ? result_.reads : result_.copies;
    if (k >= model_.ticket_count) granted_ = std::max(granted_, freed[k - model_.ticket_count].end);
    Nanoseconds begin = granted_;
    if (k >= model_.drive_depth) {
      begin = std::max(begin, result_.reads[k - model_.drive_depth].end);
    }
    begin += model_.read.latency;
    if (k > 0) begin = std::max(begin, result_.reads[k - 1].end);
    result_.reads.push_back({begin, begin + model_.read.byte_time(byte_count)});
    return result_.reads.back().end;
  }
  void copy_chunk(Slot& slot, Nanoseconds there, Nanoseconds room,
                  std::span<const CopyPiece> pieces) {
    issued_ = std::max(issued_, there);
    Nanoseconds begin = std::max(issued_, room);
    if (!result_.copies.empty()) begin = std::max(begin, result_.copies.back().end);
    Nanoseconds end = begin;
    for (const CopyPiece& piece : pieces) end += model_.copy.time(piece.byte_count);
    result_.copies.push_back({begin, end});
    slot.issued = issued_;
    slot.ready = end;
  }
  void copy_part(Slot& slot, const ReadPlan& reads, Nanoseconds room) {
    if (!reads.chunks.empty()) copy_chunk(slot, granted_, room, reads.pieces);
  }
  void visit(const PassWork& work) {
    const std::size_t i = released_.size();
    Slot& slot = slots_[work.plan.visits[i].slot];
    visitor_ = std::max(visitor_, model_.computes_on_host ? slot.ready : slot.issued);
    const Nanoseconds begin = std::max({computed_, slot.ready, visitor_});
    computed_ = slot.computed = begin + work.compute[i];
    if (model_.computes_on_host) visitor_ = computed_;
    result_.computes.push_back({begin, computed_});
    released_.push_back(visitor_);
  }

  const MakespanModel& model_;
  ReadsOf reads_of_;
  std::vector<Slot> slots_;
  Makespan result_;
  Nanoseconds begin_{};    ///< of the pass, on the visitor
  Nanoseconds fork_{};     ///< everything before the pass was computed
  Nanoseconds granted_{};  ///< the latest read was asked for
  Nanoseconds issued_{};   ///< the latest copy was enqueued
  Nanoseconds visitor_{};
  Nanoseconds computed_{};
  std::vector<Nanoseconds> released_;  ///< per visit of the pass, on the visitor
};

}  // namespace detail

/// @brief The least time that passes with these plans can take, from nothing resident, if the host
/// itself costs nothing: reads, copies and visits in plan order, one at a time in each stage, no
/// slot or staging chunk used twice at once. A pass begins as soon as the visitor has issued the
/// one before.
/// @param reads_of  `const ReadPlan&(PartId)`.
/// **Cost.** Linear in chunks and visits.
template <class ReadsOf>
[[nodiscard]] Makespan makespan_bound(const MakespanModel& model, std::span<const PassWork> passes,
                                      ReadsOf reads_of) {
  detail::MakespanRecurrence<ReadsOf> recurrence{model, reads_of};
  for (const PassWork& pass : passes) recurrence.pass(pass);
  return recurrence.take();
}

/// A block, and how many like it there are, for the closed form.
struct EqualBlocks {
  std::uint64_t block_count = 0;
  std::uint64_t chunk_count = 1;  ///< per block
  Nanoseconds read{};             ///< per chunk
  Nanoseconds copy{};             ///< per chunk
  Nanoseconds compute{};          ///< per block
};

/// @brief The makespan of one pass over equal blocks where neither slots nor chunks hold it up (two
/// of each are enough as long as no stage but the slowest has to catch up): the slower of drive and
/// link delivers a chunk at a time, and computing waits for its first block only, or for every one.
[[nodiscard]] constexpr Nanoseconds equal_blocks_makespan(const EqualBlocks& b) noexcept {
  const auto n = static_cast<std::int64_t>(b.block_count);
  const auto chunks = static_cast<std::int64_t>(b.chunk_count);
  const Nanoseconds slower = std::max(b.read, b.copy);
  const Nanoseconds first = b.read + b.copy + (chunks - 1) * slower;
  return std::max(first + n * b.compute, first + (n - 1) * chunks * slower + b.compute);
}

}  // namespace block_streamer::inline v1
