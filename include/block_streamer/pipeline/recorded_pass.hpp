// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/pipeline/pass.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace block_streamer::inline v1 {

template <execution_backend Backend, progress_loop Loop, class Rules>
std::string BlockPipeline<Backend, Loop, Rules>::why_not_recorded() const {
  if (options_.computes_on_host) return "its blocks compute on the host";
  if (shape_.mode == FetchMode::addressed) return {};
  const TransferShape& shape = shape_.transfer;
  const std::string of_all = " of " + std::to_string(storage_.block_count()) + " blocks";
  if (shape.memory_block_count < storage_.block_count()) {
    return "its storage has " + std::to_string(shape.memory_block_count) + of_all +
           " in memory, and a graph cannot wait for reads";
  }
  return "the system page-locked " + std::to_string(shape.locked_block_count) + of_all +
         ", and a graph copies from page-locked memory only";
}

template <execution_backend Backend, progress_loop Loop, class Rules>
RepeatedPlan BlockPipeline<Backend, Loop, Rules>::prepare_recording(
    std::span<const PartId> order, Stream& compute, std::optional<std::size_t> back_to) {
  expects(!pass_running_, "a pass is running: it must end before another is recorded");
  expects(why_not_recorded().empty(), "the passes of this pipeline can be recorded");
  expects_blocks(order);
  driver_.open();
  before_recording_ = statistics();
  RepeatedPlan plan =
      back_to ? plan_repeated_return(order, *back_to, shape_.space, shape_.prefetch_ahead)
              : plan_repeated(order, shape_.space, shape_.prefetch_ahead);
  hold(plan.begins, compute);
  drain();
  return plan;
}

template <execution_backend Backend, progress_loop Loop, class Rules>
auto BlockPipeline<Backend, Loop, Rules>::begin_recording(const RepeatedPlan& plan, Stream& compute)
    -> Pass {
  Machine& machine = driver_.machine();
  driver_.transfers().begin_recording();
  trace_.pause(true);
  driver_.pause_trace(true);
  driver_.transfers().begin_pass(compute, machine.epoch() + 1);
  machine.lock()->begin_pass(plan.plan, reads());
  pass_running_ = true;
  Pass pass{*this, plan.plan.visits, compute};
  driver_.progress();
  return pass;
}

template <execution_backend Backend, progress_loop Loop, class Rules>
void BlockPipeline<Backend, Loop, Rules>::end_recording(const RepeatedPlan& plan, bool failed) {
  {
    const auto locked = driver_.machine().lock();
    failed || locked->failed() ? locked.clear() : locked->keep_only(plan.kept);
    Statistics& now = locked->slots.statistics;
    const std::uint64_t blocks = now.resident_blocks, bytes = now.resident_bytes;
    now = before_recording_;
    now.resident_blocks = blocks;
    now.resident_bytes = bytes;
    now.peak_resident_blocks = std::max(now.peak_resident_blocks, blocks);
    now.peak_resident_bytes = std::max(now.peak_resident_bytes, bytes);
    now.bound_bytes = driver_.transfers().bound().size();
  }
  trace_.pause(false);
  driver_.pause_trace(false);
  driver_.transfers().end_recording();
}

template <execution_backend Backend, progress_loop Loop, class Rules>
template <class Launch>
void BlockPipeline<Backend, Loop, Rules>::replay(const RepeatedPlan& plan, Stream& compute,
                                                 Launch&& launch) {
  expects(!pass_running_,
          "a pass is running: calls must not overlap, nor come from inside a block");
  driver_.machine().rethrow_if_lost();
  driver_.machine().throw_if_failed();
  hold(plan.begins, compute);
  driver_.transfers().join(compute);
  try {
    launch();
  } catch (...) {  // something may have been enqueued all the same
    end_pass(compute);
    driver_.machine().lock()->evict_all();
    throw;
  }
  const auto locked = driver_.machine().lock();
  locked->follow(plan.plan, reads());
  for (const PlannedVisit& visit : plan.plan.visits) {
    if (finisher_)
      locked->slots.statistics.bytes_converted += bound_byte_count_[index_of(visit.part.block)];
  }
  driver_.transfers().end_pass(compute);
}

/// Nothing else is resident afterwards; what is missing was copied in the order of the copy stream.
template <execution_backend Backend, progress_loop Loop, class Rules>
void BlockPipeline<Backend, Loop, Rules>::hold(const SlotContents& kept, Stream& compute) {
  Machine& machine = driver_.machine();
  PassPlan missing;
  {
    const auto locked = machine.lock();
    locked->keep_only(kept);
    for (std::uint32_t slot = 0; slot < kept.size(); ++slot) {
      if (kept[slot] && !locked->slots[slot].part)
        missing.fetches.push_back({*kept[slot], slot, 0});
    }
  }
  if (missing.fetches.empty()) return;
  driver_.transfers().begin_pass(compute, machine.epoch() + 1);
  {
    const auto locked = machine.lock();
    locked->begin_pass(missing, reads());
    locked->slots.statistics.passes -= 1;  // it visits nothing
  }
  driver_.progress();
  end_pass(compute);
  machine.throw_if_failed();
}

}  // namespace block_streamer::inline v1
