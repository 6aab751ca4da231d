// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/mutation_guard.hpp>
#include <block_streamer/train/rng_replay.hpp>
#include <block_streamer/train/streamed_run.hpp>

#include <c10/core/GradMode.h>

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What a backward needs of one visit of the forward.
struct SavedVisit {
  at::Tensor input;           ///< detached: shares memory and version counter with what flowed in
  std::uint32_t version = 0;  ///< of the input then
  RngState random;
};

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

/// @brief Runs the whole list without grad.
/// @param saved     if not null, receives what a backward needs of each visit, and dropout is
/// active.
/// @param observer  called with each block and its output.
template <class Run, class Observer = NoObserver>
[[nodiscard]] typename Run::Hidden forward_pass(Run& run, typename Run::Hidden hidden,
                                                typename Run::Context& context,
                                                std::vector<SavedVisit>* saved, bool training,
                                                Observer&& observer = {}) {
  const c10::NoGradGuard no_grad;
  const std::size_t n = run.blocks().size();
  const VisitOrder forward = ascending(0, n);
  // The backward will end where nothing below trains (see backward_pass).
  const std::size_t lowest = hidden.requires_grad() ? 0 : run.blocks().lowest_trainable();
  const VisitOrder backward = saved != nullptr ? descending(lowest, n) : forward;
  const MasterRelease release{run, /*backward_follows=*/saved != nullptr};
  run.refetch_masters();
  run.walk(forward, release.due() ? VisitOrder{} : joined(backward, forward),
           [&](BlockId block, auto&& run_block, std::span<const std::byte> slot) {
             if (saved != nullptr) {
               at::Tensor input = hidden.detach();
               const auto version = static_cast<std::uint32_t>(input._version());
               saved->push_back({std::move(input), version, RngState::capture(run.device())});
             }
             hidden = detached_from(slot, run_block(hidden, context, training));
             observer(block, hidden);
           });
  return hidden;
}

}  // namespace block_streamer::inline v1
