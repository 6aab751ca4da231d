// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/block_result.hpp>
#include <block_streamer/block/device_graph.hpp>
#include <block_streamer/block/replayable_context.hpp>
#include <block_streamer/capture/recording.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/plan/repeated_plan.hpp>
#include <block_streamer/train/autocast_state.hpp>
#include <block_streamer/train/forward_pass.hpp>
#include <block_streamer/train/streamed_run.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One forward of the list in evaluation mode, copies included, recorded in a graph of the
/// device: with inputs of one shape, in one place. Write input(), call replay(), read output().
/// It computes what a forward would, with the same kernels. Of what it uses, values may change:
/// those of the input, of a context's tensors, of adapters, of the storage's bytes where the tier
/// is in the caller's hands (a MasterStorage); what they *are* may not, @see is_current.
/// **Threads.** Externally synchronised with the streamer.
/// **Lifetime.** Shares the streamer's core, so it may outlive the Streamer. Adapters' tensors are
/// kept alive by the core until others are attached.
/// **Cost.** Keeps what one pass allocates on the device beside the streamer's slots, which it
/// shares.
template <streamable_block Block, execution_backend Backend>
class CapturedPass {
 public:
  using Run = StreamedRun<Block, Backend>;
  using Graph = DeviceGraph<Backend>;
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;

  /// @brief Runs the list once, then records it. @param side  where; it outlives the pass.
  /// @throws UnsupportedError naming the block that cannot be recorded; what a forward throws.
  CapturedPass(std::shared_ptr<Run> run, typename Graph::Side& side, const Hidden& input,
               const Context& context)
      : run_{std::move(run)}, context_{context}, casts_{AutocastState::capture(run_->device())} {
    const typename Run::Walk walk{*run_};
    const c10::NoGradGuard no_grad;
    const c10::InferenceMode normal{false};
    input_ = input.detach().clone();
    detail::own_replayed(context_);
    side.run([this] {
      static_cast<void>(forward_pass<Run>(*run_, {{input_}, {&context_, 1}}, nullptr, false));
      record();
    });
    generation_ = run_->generation();
    opened_ = run_->pipeline().opened();
  }
  CapturedPass(const CapturedPass&) = delete;
  CapturedPass& operator=(const CapturedPass&) = delete;
  /// Waits until no replay runs.
  ~CapturedPass() {
    try {
      run_->pipeline().drain();
    } catch (...) {  // a lost device runs nothing
    }
  }

  /// @brief What the pass reads. Write it on the stream that replay() is called on.
  [[nodiscard]] Hidden& input() noexcept { return input_; }
  /// @brief What the latest replay gave; the next one writes over it.
  [[nodiscard]] const Hidden& output() const noexcept { return output_; }
  /// @brief What the last block gave beside it.
  [[nodiscard]] const std::vector<at::Tensor>& extras() const noexcept { return extras_; }
  /// @brief The context that it was recorded with, its tensors in places of their own if it is a
  /// replayable_context.
  [[nodiscard]] Context& context() noexcept { return context_; }
  /// @brief How its copies go: what stays on the device, and what is fetched each time.
  [[nodiscard]] const RepeatedPlan& plan() const noexcept { return plan_; }

  /// @brief False once the streamer was closed, changed its type or got other adapters.
  [[nodiscard]] bool is_current() const {
    return generation_ == run_->generation() && opened_ == run_->pipeline().opened() &&
           run_->pipeline().is_open();
  }
  /// @brief A forward with this input would enqueue the same, but for the values.
  [[nodiscard]] bool serves(const Hidden& input) const {
    return is_current() && detail::is_like(input_, input) &&
           casts_ == AutocastState::capture(run_->device());
  }
  [[nodiscard]] bool serves(const Hidden& input,
                            Context& context) requires replayable_context<Context> {
    return serves(input) && detail::is_like_context(context_, context);
  }
  /// @brief Takes over the values, on the current stream. @pre serves() them; replays on other
  /// streams are over.
  void load(const Hidden& input) {
    const c10::NoGradGuard no_grad;
    input_.copy_(input, /*non_blocking=*/true);
  }
  void load_context(Context& context) requires replayable_context<Context> {
    const c10::NoGradGuard no_grad;
    detail::load_replayed(context_, context);
  }

  /// @brief Enqueues the pass on LibTorch's current stream. Statistics, history and observer see a
  /// pass. Blocks that the plan keeps are fetched again first, if another pass took their slots or
  /// their masters changed.
  /// @throws ContractViolation if it is not current; DeviceError.
  void replay() {
    replay_between([] {}, [] {});
  }
  /// @brief The same with these values, whatever the stream of the replay before. @pre serves()
  /// them. @returns a result of the caller's own.
  [[nodiscard]] ResultOf<Block> forward(const Hidden& input, Context& context) {
    Hidden output;
    std::vector<at::Tensor> extras;
    replay_between(
        [&] {
          load(input);
          if constexpr (replayable_context<Context>) load_context(context);
        },
        [&] {
          const c10::NoGradGuard no_grad;
          output = output_.clone();
          for (const at::Tensor& extra : extras_)
            extras.push_back(extra.defined() ? extra.clone() : at::Tensor{});
        });
    return whole_result<Block>(std::move(output), std::move(extras));
  }

 private:
  /// `before` and `after` enqueue too: after the pass before, and before whatever comes next.
  template <class Before, class After>
  void replay_between(Before&& before, After&& after) {
    const typename Run::Walk walk{*run_};
    expects(is_current(),
            "the streamer was closed, or its type or adapters changed, since this pass was "
            "recorded: capture it again");
    const MasterRelease<Run> release{*run_, /*backward_follows=*/false};
    run_->refetch_masters();
    run_->replay_walk(plan_, [&] {
      before();
      graph_.replay();
      after();
    });
  }
  void record() {
    plan_ = run_->prepare_recording();
    std::string where = "this pass";
    detail::record_pass(*run_, graph_, plan_, where, [&] { walk(where); });
  }
  void walk(std::string& where) {
    const std::size_t n = run_->blocks().size();
    std::vector<at::Tensor> extras(Run::extra_count);
    Hidden hidden = input_;
    const typename Run::RecordedWalks recorded{*run_, plan_, detail::watch<Run>(where, graph_)};
    run_->walk(ascending(0, n), {},
               [&](BlockId block, auto&& run_block, std::span<const std::byte> slot) {
                 const bool whole = Run::extra_count > 0 && index_of(block) + 1 == n;
                 hidden = detail::run_visit<Run>(run_block, slot, hidden, context_,
                                                 /*training=*/false, whole ? &extras : nullptr);
               });
    output_ = std::move(hidden);
    extras_ = std::move(extras);
  }

  std::shared_ptr<Run> run_;
  Context context_;
  AutocastState casts_;
  Hidden input_;
  Hidden output_;  ///< in the graph's memory
  std::vector<at::Tensor> extras_;
  RepeatedPlan plan_;
  Graph graph_;
  std::uint64_t generation_ = 0;
  std::uint64_t opened_ = 0;
};

}  // namespace block_streamer::inline v1
