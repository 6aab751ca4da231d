// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/context_tensors.hpp>
#include <block_streamer/capture/captured_forward.hpp>
#include <block_streamer/capture/recorded_step.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/train/step_pass.hpp>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Training steps of a streamer whose adapters train, up to the gradients, replayed from
/// graphs of the device: the host enqueues one graph instead of every copy and kernel of forward,
/// loss and backward. The optimizer is stepped outside, as after any backward. The first step of a
/// shape (of input, targets and context; autocast; what trains) does everything once and records
/// it; so does the first one after the streamer was closed, converted or given other adapters.
/// Made by Streamer::capture_step().
/// **Values** of input, targets, a replayable_context's tensors, adapters, and of tensors that the
/// loss uses beside its arguments, may change between steps, in place. What a block or the loss
/// decides on the host stays as it was recorded.
/// **Gradients.** Where a parameter has no .grad, it becomes the tensor that the graph writes: the
/// next step writes over it, so a copy of the handle is no copy of the values. Where it has one,
/// the step adds to it, as a backward does.
/// **Threads.** Externally synchronised with the streamer. **Lifetime.** Shares the streamer's
/// core. **Cost.** For each shape what one step allocates on the device; copies of what a step is
/// given.
template <streamable_block Block, execution_backend Backend>
class CapturedStep {
 public:
  using Recorded = RecordedStep<Block, Backend>;
  using Run = typename Recorded::Run;
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;
  using Loss = StepLoss<Block>;

  /// @param context  what the blocks get where a step names no other: kept as it is now.
  /// @throws UnsupportedError saying why no step of this streamer can be recorded.
  CapturedStep(std::shared_ptr<Run> run, Loss loss, Context context, CaptureOptions options)
      : run_{std::move(run)},
        loss_{std::move(loss)},
        context_{std::move(context)},
        steps_{options.shapes} {
    expects(options.shapes > 0, "a captured step keeps at least one shape");
    expects(loss_ != nullptr, "a step has a loss");
    detail::expect_recordable<typename Recorded::Graph>(*run_);
    if (!run_->activations().keeps_on_device()) {
      throw detail::step_refusal(
          "inputs of blocks wait for the backward elsewhere than on the device");
    }
    side_ = std::make_unique<typename Recorded::Graph::Side>(run_->pipeline().backend(),
                                                             run_->device());
  }

  /// @brief What `loss(streamer.train().forward(input), targets)` and its backward() do, bit for
  /// bit where kernels repeat themselves: parameters' .grad, random numbers, the loss.
  /// @param targets  on the streamer's device; what the loss gets beside the list's result.
  /// @returns the loss, a tensor of the caller's own without a graph.
  /// @throws UnsupportedError naming the block, or what else it is, that cannot be recorded,
  /// whenever it is tried; the streamer stays usable. What a step throws.
  [[nodiscard]] at::Tensor run(const Hidden& input, const std::vector<at::Tensor>& targets = {}) {
    return step_for(input, context_, targets).run(input, context_, targets);
  }
  [[nodiscard]] at::Tensor run(const Hidden& input, Context& context,
                               const std::vector<at::Tensor>& targets = {}) requires
      replayable_context<Context> {
    return step_for(input, context, targets).run(input, context, targets);
  }
  /// @brief Steps recorded so far, those that were given up included.
  [[nodiscard]] std::size_t recorded_count() const noexcept { return steps_.made_count(); }

 private:
  [[nodiscard]] Recorded& step_for(const Hidden& input, Context& context,
                                   std::span<const at::Tensor> targets) {
    run_->check_input(input);
    if (input.requires_grad()) throw detail::step_refusal("its input needs a gradient");
    if (needs_gradient(context))
      throw detail::step_refusal("a tensor of the context needs a gradient");
    for (const at::Tensor& target : targets)
      expects(target.defined() && target.device() == run_->device() && !target.requires_grad(),
              "targets of a captured step are tensors on the streamer's device, without gradient");
    expects(run_->updates() == nullptr || !run_->updates()->open(),
            "a captured step leaves gradients in .grad: run it outside of begin_step … end_step");
    return steps_.find_or_make([&](Recorded& step) { return step.serves(input, context, targets); },
                               [&] {
                                 detail::expect_replayable(context);
                                 return std::make_unique<Recorded>(run_, *side_, loss_, input,
                                                                   context, targets);
                               });
  }

  std::shared_ptr<Run> run_;
  Loss loss_;
  Context context_;
  std::unique_ptr<typename Recorded::Graph::Side> side_;
  detail::LatestRecordings<Recorded> steps_;
};

}  // namespace block_streamer::inline v1
