// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/block_result.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/train/autocast_state.hpp>
#include <block_streamer/train/backward_pass.hpp>
#include <block_streamer/train/forward_pass.hpp>
#include <block_streamer/train/gradient_ledger.hpp>
#include <block_streamer/train/graph_leaves.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief From what a list gives, and what it is to give, to the loss: one number on the device.
template <streamable_block Block>
using StepLoss = std::function<at::Tensor(const ResultOf<Block>&, std::span<const at::Tensor>)>;

namespace detail {

[[nodiscard]] inline UnsupportedError step_refusal(const std::string& why) {
  return UnsupportedError{"a training step cannot be recorded in a graph: " + why};
}

/// `leaves` is everything that the loss leads to and that needs a gradient.
inline void check_loss(const at::Tensor& loss, const at::Device& device,
                       const std::vector<at::Tensor>& leaves) {
  expects(loss.defined() && loss.numel() == 1 && loss.device() == device,
          "the loss of a step is one number on the streamer's device");
  if (!loss.requires_grad()) throw step_refusal("its loss does not depend on what the list gives");
  for (const at::Tensor& leaf : leaves_behind(loss, at::Tensor{})) {
    const auto is_leaf = [&](const at::Tensor& known) { return known.is_same(leaf); };
    if (std::ranges::none_of(leaves, is_leaf))
      throw step_refusal("its loss leads to another tensor that needs a gradient");
  }
}

/// A loss, and its gradients for what it was computed from; undefined where none reaches.
struct PulledLoss {
  at::Tensor loss;  ///< without its graph
  std::vector<at::Tensor> gradients;
};

/// @param given  what left the last block, with its extras.
template <class Run, class Loss>
[[nodiscard]] PulledLoss pull_loss(const Run& run, const Loss& loss, std::vector<at::Tensor> given,
                                   std::span<const at::Tensor> targets) {
  std::vector<at::Tensor> leaves;
  for (at::Tensor& output : given) {
    if (!output.defined() || !torch::autograd::isDifferentiableType(output.scalar_type())) continue;
    output = output.detach().set_requires_grad(true);
    leaves.push_back(output);
  }
  forget_casts(run.device());
  const c10::AutoGradMode grad_mode{true};
  const at::Tensor value = loss(
      whole_result<typename Run::Block>(given.front(), {given.begin() + 1, given.end()}), targets);
  check_loss(value, run.device(), leaves);
  std::vector<at::Tensor> found =
      torch::autograd::grad({value}, leaves, /*grad_outputs=*/{}, /*retain_graph=*/false,
                            /*create_graph=*/false, /*allow_unused=*/true);
  forget_casts(run.device());
  PulledLoss pulled{value.detach(), std::vector<at::Tensor>(given.size())};
  for (std::size_t i = 0, leaf = 0; i < given.size(); ++i) {
    if (given[i].defined() && given[i].requires_grad())
      pulled.gradients[i] = std::move(found[leaf++]);
  }
  return pulled;
}

}  // namespace detail

/// @brief A training step up to the gradients of adapters: forward, loss and backward on the
/// calling thread, but for what the engine runs on its own, without the list's node in a graph:
/// whoever records a step must know which thread enqueues what on which stream.
/// @param input    needs no gradient. @param context  the blocks'; none of its tensors needs one.
/// @param ledger   receives the gradients.
/// @returns the loss. @throws UnsupportedError if the loss does not depend on the list, or leads to
/// other tensors that need a gradient.
template <class Run, class Loss>
[[nodiscard]] at::Tensor step_pass(Run& run, const Loss& loss, const at::Tensor& input,
                                   typename Run::Context& context,
                                   std::span<const at::Tensor> targets, GradientLedger& ledger) {
  const c10::NoGradGuard no_grad;
  SavedForward<typename Run::Context> saved{{}, {false}, AutocastState::capture(run.device())};
  saved.contexts.emplace_back(context);
  PassOutputs<Run> outputs =
      forward_pass<Run>(run, {{input}, {&context, 1}}, &saved, /*training=*/true);
  std::vector<at::Tensor> given{std::move(outputs.hidden[0])};
  given.insert(given.end(), outputs.extras[0].begin(), outputs.extras[0].end());
  outputs = {};
  detail::PulledLoss pulled = detail::pull_loss(run, loss, std::move(given), targets);
  static_cast<void>(backward_pass(run, saved, {std::move(pulled.gradients)}, ledger));
  return pulled.loss;
}

}  // namespace block_streamer::inline v1
