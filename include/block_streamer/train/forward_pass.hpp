// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/mutation_guard.hpp>
#include <block_streamer/train/saved_forward.hpp>
#include <block_streamer/train/streamed_run.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Nobody looks at the outputs of blocks.
struct NoObserver {
  template <class Hidden>
  void operator()(BlockId, const Hidden&) const noexcept {}
};

/// @brief At the end of a pass over masters that train, also of one that fails, waits until no copy
/// reads them: the caller may step an optimizer then. Only a forward whose backward follows does
/// not wait.
template <class Run>
class MasterRelease {
 public:
  MasterRelease(Run& run, bool backward_follows)
      : run_{run}, trains_{run.masters_train()}, due_{trains_ && !backward_follows} {}
  MasterRelease(const MasterRelease&) = delete;
  MasterRelease& operator=(const MasterRelease&) = delete;
  ~MasterRelease() {
    if (!due_ && !(trains_ && std::uncaught_exceptions() > exceptions_)) return;
    try {
      run_.release_masters();
    } catch (...) {  // a lost device copies nothing; the next pass tells of it
    }
  }
  /// @brief It will wait, so fetching ahead for a next pass is of no use.
  [[nodiscard]] bool due() const noexcept { return due_; }

 private:
  Run& run_;
  bool trains_;
  bool due_;
  int exceptions_ = std::uncaught_exceptions();
};

/// Leaves no input on its way behind if a pass fails.
template <class Run>
struct ActivationsInFlight {
  Run& run;
  ~ActivationsInFlight() { run.activations().abandon(); }
};

/// What passes each block together, one after another in this order.
template <class Run>
struct MicroBatches {
  std::vector<typename Run::Hidden> hidden;     ///< what flows: inputs at first
  std::span<typename Run::Context> contexts{};  ///< one each
  /// Where the random numbers of each are, moved on as they draw; empty: all draw from the caller's
  /// generators, in the order of the visits.
  std::span<RngState> random{};
};

/// What left the last block, for each micro-batch.
template <class Run>
struct PassOutputs {
  std::vector<typename Run::Hidden> hidden;
  std::vector<std::vector<at::Tensor>> extras;  ///< what its result has beside it
};

namespace detail {
template <class Run>
[[nodiscard]] SavedVisit save_visit(Run& run, const at::Tensor& input) {
  return {run.activations().save(input, run.compute()), run.random_now(), 0};
}
/// One micro-batch of one visit; nothing of the outputs lies in the slot.
template <class Run, class RunBlock>
[[nodiscard]] typename Run::Hidden run_visit(const RunBlock& run_block,
                                             std::span<const std::byte> slot,
                                             const typename Run::Hidden& hidden,
                                             typename Run::Context& context, bool training,
                                             std::vector<at::Tensor>* extras) {
  auto output = detached_from(slot, run_block(hidden, context, training, extras));
  if (extras != nullptr) {
    for (at::Tensor& extra : *extras) extra = detached_from(slot, std::move(extra));
  }
  return output;
}
}  // namespace detail

/// @brief Runs the whole list without grad; each block is fetched once for all micro-batches.
/// @param saved     if not null, its visits receive what a backward needs.
/// @param observer  called with each block and its output.
/// @returns what left the last block, for each micro-batch.
template <class Run, class Observer = NoObserver>
[[nodiscard]] PassOutputs<Run> forward_pass(Run& run, MicroBatches<Run> batches,
                                            SavedForward<typename Run::Context>* saved,
                                            bool training, Observer&& observer = {}) {
  const c10::NoGradGuard no_grad;
  const std::size_t n = run.blocks().size();
  auto& hidden = batches.hidden;
  const std::size_t trainable = run.blocks().lowest_trainable();
  // The backward will end where nothing below trains (see backward_pass).
  const std::size_t lowest = saved != nullptr && saved->any_reaches_first() ? 0 : trainable;
  std::vector<std::vector<at::Tensor>> extras(hidden.size(),
                                              std::vector<at::Tensor>(Run::extra_count));
  const VisitOrder forward = ascending(0, n);
  const VisitOrder backward = saved != nullptr ? descending(lowest, n) : forward;
  const MasterRelease release{run, /*backward_follows=*/saved != nullptr};
  const ActivationsInFlight<Run> in_flight{run};
  run.refetch_masters();
  run.walk(
      forward, release.due() ? VisitOrder{} : joined(backward, forward),
      [&](BlockId block, auto&& run_block, std::span<const std::byte> slot) {
        for (std::size_t b = 0; b < hidden.size(); ++b) {
          const RngTurn turn{batches.random.empty() ? nullptr : &batches.random[b]};
          if (saved != nullptr) {
            const bool wanted = index_of(block) >= trainable || saved->reaches_first(b);
            saved->visits.push_back(wanted ? detail::save_visit(run, hidden[b]) : SavedVisit{});
          }
          const bool whole = Run::extra_count > 0 && index_of(block) + 1 == n;
          hidden[b] = detail::run_visit<Run>(run_block, slot, hidden[b], batches.contexts[b],
                                             training, whole ? &extras[b] : nullptr);
          if (saved != nullptr) saved->visits.back().mode = run.blocks().mode(block);
          observer(block, hidden[b]);
        }
      });
  if (saved != nullptr) run.activations().settle(run.compute());
  return {std::move(hidden), std::move(extras)};
}

}  // namespace block_streamer::inline v1
