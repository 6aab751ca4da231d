// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/device_graph.hpp>
#include <block_streamer/capture/recording.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/plan/repeated_plan.hpp>
#include <block_streamer/train/autocast_state.hpp>
#include <block_streamer/train/gradient_ledger.hpp>
#include <block_streamer/train/rng_replay.hpp>
#include <block_streamer/train/step_gradients.hpp>
#include <block_streamer/train/step_pass.hpp>
#include <block_streamer/train/streamed_run.hpp>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One training step up to its gradients, recorded in a graph of the device: forward, loss,
/// and the backward with its second fetch of the blocks, with inputs and targets of one shape. What
/// it computes is what a streamed step would, with the same kernels in the same order.
/// @see CapturedStep
/// **Threads.** Externally synchronised with the streamer.
/// **Lifetime.** Shares the streamer's core; keeps parameters and places of their gradients alive.
/// **Cost.** Keeps what one step allocates on the device: the blocks' inputs, one block's graph or
/// what the loss needs, and the gradients.
template <streamable_block Block, execution_backend Backend>
class RecordedStep {
 public:
  using Run = StreamedRun<Block, Backend>;
  using Graph = DeviceGraph<Backend>;
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;
  using Loss = StepLoss<Block>;

  /// @brief Does the step once without touching a .grad, then records it.
  /// @param side  where; it outlives the step. @param loss  may be called twice, here only.
  /// @throws UnsupportedError saying what cannot be recorded; what a step throws.
  RecordedStep(std::shared_ptr<Run> run, typename Graph::Side& side, const Loss& loss,
               const Hidden& input, const Context& context, std::span<const at::Tensor> targets)
      : run_{std::move(run)},
        context_{context},
        casts_{AutocastState::capture(run_->device())},
        random_{run_->device(), run_->blocks().size()},
        gradients_{run_->blocks()} {
    const typename Run::Walk walk{*run_};
    expect_trainable();
    const c10::NoGradGuard no_grad;
    const c10::InferenceMode normal{false};
    input_ = input.detach().clone();
    for (const at::Tensor& target : targets) targets_.push_back(target.detach().clone());
    detail::own_replayed(context_);
    side.run([&] {
      const detail::FreshAccumulators accumulators{gradients_.parameters()};
      compute_once(loss);
      record(loss);
    });
    generation_ = run_->generation();
    opened_ = run_->pipeline().opened();
  }
  RecordedStep(const RecordedStep&) = delete;
  RecordedStep& operator=(const RecordedStep&) = delete;
  /// Waits until no replay runs.
  ~RecordedStep() {
    try {
      run_->pipeline().drain();
    } catch (...) {  // a lost device runs nothing
    }
  }

  /// @brief How its copies go: what stays on the device, and what is fetched each time.
  [[nodiscard]] const RepeatedPlan& plan() const noexcept { return plan_; }
  /// @brief False once the streamer was closed, changed its type or got other adapters.
  [[nodiscard]] bool is_current() const {
    return generation_ == run_->generation() && opened_ == run_->pipeline().opened() &&
           run_->pipeline().is_open();
  }
  /// @brief A step with these would enqueue the same, but for the values.
  [[nodiscard]] bool serves(const Hidden& input, Context& context,
                            std::span<const at::Tensor> targets) {
    return is_current() && detail::is_like(input_, input) &&
           std::ranges::equal(targets_, targets, detail::is_like) &&
           detail::is_like_context(context_, context) && gradients_.trains_alike(run_->blocks()) &&
           casts_ == AutocastState::capture(run_->device());
  }
  /// @brief Enqueues the step with these values on LibTorch's current stream, and does to every
  /// parameter's .grad what a backward does. @pre serves() them. @returns the loss, the caller's.
  [[nodiscard]] at::Tensor run(const Hidden& input, Context& context,
                               std::span<const at::Tensor> targets) {
    const typename Run::Walk walk{*run_};
    const c10::NoGradGuard no_grad;
    const c10::InferenceMode normal{false};
    gradients_.expect_no_hooks();
    run_->refetch_masters();
    at::Tensor loss;
    run_->replay_walk(plan_, [&] {
      input_.copy_(input, /*non_blocking=*/true);
      for (std::size_t i = 0; i < targets_.size(); ++i)
        targets_[i].copy_(targets[i], /*non_blocking=*/true);
      detail::load_replayed(context_, context);
      gradients_.save_earlier();
      random_.before_replay();
      graph_.replay();
      gradients_.add_to_parameters();
      loss = loss_.clone();
    });
    return loss;
  }

 private:
  void expect_trainable() const {
    if (run_->blocks().lowest_trainable() == run_->blocks().size())
      throw detail::step_refusal("nothing of the list trains");
    if (run_->masters_train())
      throw detail::step_refusal("gradients of masters leave for the host");
  }

  /// As it is recorded: kernels, libraries and memory are made ready by it.
  void compute_once(const Loss& loss) {
    const auto host_random = [] {
      return at::globalContext().defaultGenerator(at::Device{at::kCPU}).get_state();
    };
    const at::Tensor before = host_random();
    const RngState callers = RngState::capture(run_->device());
    std::string where;
    compute(loss, where);
    loss_ = at::Tensor{};
    gradients_.clear();
    const bool drew = !at::equal(before, host_random());
    callers.apply();
    if (drew) throw detail::step_refusal("it draws random numbers on the host");
  }
  void record(const Loss& loss) {
    plan_ = run_->prepare_recording(run_->blocks().lowest_trainable());
    std::string where = "the loss";
    const auto walks = [&] {
      auto watch = detail::watch<Run>(where, graph_);
      watch.begins = [&, next = std::move(watch.begins), n = run_->blocks().size(),
                      visits = std::size_t{0}](BlockId block) mutable {
        if (visits++ < n) random_.mark(index_of(block));
        next(block);
      };
      watch.random = [this](BlockId block) { return random_.again(index_of(block)); };
      const typename Run::RecordedWalks recorded{*run_, plan_, std::move(watch)};
      compute(loss, where);
    };
    detail::record_pass(*run_, graph_, plan_, where, walks, &random_);
  }

  void compute(const Loss& loss, std::string& where) {
    GradientLedger ledger = gradients_.make_ledger(run_->blocks(), run_->masters());
    loss_ = step_pass<Run>(*run_, loss, input_, context_, targets_, ledger);
    gradients_.take(ledger);
    where = "the gradients";
  }

  std::shared_ptr<Run> run_;
  Context context_;
  AutocastState casts_;
  Hidden input_;
  std::vector<at::Tensor> targets_;
  typename Graph::RepeatedRandom random_;  ///< of blocks; before the graph, which uses it
  at::Tensor loss_;                        ///< in the graph's memory, as the gradients
  detail::StepGradients gradients_;
  RepeatedPlan plan_;
  Graph graph_;
  std::uint64_t generation_ = 0;
  std::uint64_t opened_ = 0;
};

}  // namespace block_streamer::inline v1
