// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/capture/captured_forward.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/loss_over_tokens.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <functional>
#include <memory>
#include <span>

namespace block_streamer::inline v1 {

/// @brief Forward, loss and backward of one micro-batch: what it adds to the loss of a step with so
/// many trained tokens; the gradients go to .grad.
template <class Context>
using MicroBatchStep = std::function<at::Tensor(const at::Tensor& input, Context& context,
                                                const TokenTargets& targets, double trained)>;

/// @brief One that is recorded in a graph of the device for each shape, and replayed: the bits are
/// those of loss_over_tokens() divided by `trained`, and of its backward.
/// **Lifetime.** Model and streamer outlive it.
/// @throws UnsupportedError saying why it cannot be.
template <class Model, class Streamer>
[[nodiscard]] MicroBatchStep<typename Streamer::Context> recorded_micro_batches(
    const Model& model, Streamer& streamer, CaptureOptions options = {}) {
  if (!model.head_is_resident()) {
    throw UnsupportedError{
        "a training step cannot be recorded in a graph: its head is streamed, through a pipeline "
        "of its own"};
  }
  const auto loss = [&model](const at::Tensor& hidden, std::span<const at::Tensor> given) {
    return loss_over_tokens(model, hidden, ScoredTokens{given[0], given[1]}).sum * given[2];
  };
  const auto step = std::make_shared<decltype(streamer.capture_step(loss, options))>(
      streamer.capture_step(loss, options));
  return [step](const at::Tensor& input, typename Streamer::Context& context,
                const TokenTargets& targets, double trained) {
    const ScoredTokens scored = scored_tokens(targets, input.device());
    // LibTorch divides by a number of the host as it multiplies by its reciprocal, in fp32.
    const at::Tensor share = at::full({}, 1.0F / static_cast<float>(trained),
                                      input.options().dtype(at::kFloat).requires_grad(false));
    return step->run(input, context, {scored.positions, scored.wanted, share});
  };
}

}  // namespace block_streamer::inline v1
