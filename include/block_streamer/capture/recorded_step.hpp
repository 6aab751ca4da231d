// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/block_result.hpp>
#include <block_streamer/block/context_tensors.hpp>
#include <block_streamer/block/device_graph.hpp>
#include <block_streamer/capture/recording.hpp>
#include <block_streamer/capture/step_gradients.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/plan/repeated_plan.hpp>
#include <block_streamer/train/autocast_state.hpp>
#include <block_streamer/train/backward_pass.hpp>
#include <block_streamer/train/forward_pass.hpp>
#include <block_streamer/train/graph_leaves.hpp>
#include <block_streamer/train/streamed_run.hpp>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief From what a list gives, and what it is to give, to the loss: one number on the device.
template <streamable_block Block>
using StepLoss = std::function<at::Tensor(const ResultOf<Block>&, std::span<const at::Tensor>)>;

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
    expect_trainable(input);
    const c10::NoGradGuard no_grad;
    const c10::InferenceMode normal{false};
    input_ = input.detach().clone();
    for (const at::Tensor& target : targets) targets_.push_back(target.detach().clone());
    detail::own_replayed(context_);
    side.run([&] {
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
  [[nodiscard]] static UnsupportedError refusal(const std::string& why) {
    return UnsupportedError{"a training step cannot be recorded in a graph: " + why};
  }
  void expect_trainable(const Hidden& input) {
    if (run_->blocks().lowest_trainable() == run_->blocks().size())
      throw refusal("nothing of the list trains");
    if (input.requires_grad()) throw refusal("its input needs a gradient");
    if (needs_gradient(context_)) throw refusal("a tensor of the context needs a gradient");
    if (run_->masters_train()) throw refusal("gradients of masters leave for the host");
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
    if (drew) throw refusal("it draws random numbers on the host");
  }
  void record(const Loss& loss) {
    plan_ = run_->prepare_recording(run_->blocks().lowest_trainable());
    const detail::FreshAccumulators accumulators{gradients_.parameters()};
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

  /// The step's forward, loss and backward, on the calling thread but for what the engine runs.
  void compute(const Loss& loss, std::string& where) {
    SavedForward<Context> saved{{}, {false}, casts_};
    saved.contexts.emplace_back(context_);
    PassOutputs<Run> outputs =
        forward_pass<Run>(*run_, {{input_}, {&context_, 1}}, &saved, /*training=*/true);
    std::vector<at::Tensor> given{std::move(outputs.hidden[0])};
    given.insert(given.end(), outputs.extras[0].begin(), outputs.extras[0].end());
    outputs = {};
    std::vector<at::Tensor> pulled = pull_loss(loss, std::move(given));
    GradientLedger ledger = gradients_.make_ledger(run_->blocks(), run_->masters());
    static_cast<void>(backward_pass(*run_, saved, {std::move(pulled)}, ledger));
    gradients_.take(ledger);
    where = "the gradients";
  }
  /// @returns the gradients of what the list gave.
  [[nodiscard]] std::vector<at::Tensor> pull_loss(const Loss& loss, std::vector<at::Tensor> given) {
    std::vector<at::Tensor> leaves;
    for (at::Tensor& output : given) {
      if (!output.defined() || !torch::autograd::isDifferentiableType(output.scalar_type()))
        continue;
      output = output.detach().set_requires_grad(true);
      leaves.push_back(output);
    }
    forget_casts(run_->device());
    const c10::AutoGradMode grad_mode{true};
    const at::Tensor value =
        loss(whole_result<Block>(given.front(), {given.begin() + 1, given.end()}), targets_);
    check_loss(value, leaves);
    loss_ = value.detach();
    std::vector<at::Tensor> found = torch::autograd::grad(
        {value}, leaves, {}, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
    forget_casts(run_->device());
    std::vector<at::Tensor> of_given(given.size());
    for (std::size_t i = 0, leaf = 0; i < given.size(); ++i) {
      if (given[i].defined() && given[i].requires_grad()) of_given[i] = std::move(found[leaf++]);
    }
    return of_given;
  }
  void check_loss(const at::Tensor& value, const std::vector<at::Tensor>& leaves) const {
    expects(value.defined() && value.numel() == 1 && value.device() == run_->device(),
            "the loss of a step is one number on the streamer's device");
    if (!value.requires_grad()) throw refusal("its loss does not depend on what the list gives");
    for (const at::Tensor& leaf : detail::leaves_behind(value, at::Tensor{})) {
      const auto is_leaf = [&](const at::Tensor& known) { return known.is_same(leaf); };
      if (std::ranges::none_of(leaves, is_leaf))
        throw refusal("its loss leads to another tensor that needs a gradient");
    }
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
