// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <span>

namespace block_streamer::inline v1 {

/// What holds for all of one optimizer step.
struct StepContext {
  std::uint64_t step = 1;    ///< 1-based number of the training step
  double learning_rate = 0;  ///< schedules live outside the policy
  double gradient_scale =
      1;  ///< 1/accumulation x clip factor x 1/loss scale: applied by the policy
};

/// When gradients reach the policy. `never`: frozen. `by_caller`: they land in .grad, any
/// torch::optim steps them. `in_backward`: update() for a block as soon as its gradient exists,
/// unless something needs all gradients first (clipping, accumulation): then the trainer keeps them
/// and calls update() in a sweep after backward. The policy cannot tell the difference.
enum class GradientDelivery : std::uint8_t { never, by_caller, in_backward };

/// @brief How trainable tensors change. One step = begin_step, then per block [prefetch] update,
/// then end_step; each block at most once a step, in any order, on one thread, unless
/// updates_on_any_thread.
/// - `delivery()`: constant for the life of the object; cheap, never throws.
/// - `begin_step(context)`: what follows belongs to that step. Cheap; may throw on a caller's
/// error.
/// - `prefetch(block)`: a hint that this block's update comes soon (state on disk). Never throws.
/// - `update(block, parameters, gradients)`: consumes the gradients (their memory is reused when it
///   returns or, on a device, in stream order) and writes the parameters in place. An undefined
///   gradient leaves its parameter and that parameter's state alone.
/// - `end_step()`: makes the step durable where state is on disk, and returns only then; if
/// anything
///   throws before, the committed state is the previous step's.
template <class O>
concept optimizer_policy = std::movable<O> &&
    requires(O& optimizer, const O& constant_optimizer, BlockId block, const StepContext& step,
             std::span<at::Tensor> parameters, std::span<at::Tensor> gradients) {
  { constant_optimizer.delivery() }
  noexcept->std::same_as<GradientDelivery>;
  { optimizer.begin_step(step) } -> std::same_as<void>;
  { optimizer.prefetch(block) }
  noexcept->std::same_as<void>;
  { optimizer.update(block, parameters, gradients) } -> std::same_as<void>;
  { optimizer.end_step() } -> std::same_as<void>;
};

/// @brief A policy that says `static constexpr bool any_thread = true`: its updates of parameters
/// in host memory may run on a thread of the streamer's, one at a time, ordered with begin_step and
/// end_step as if they were on the caller's. They then overlap with the next block's visit.
template <class O>
inline constexpr bool updates_on_any_thread = [] {
  if constexpr (requires {
                  { O::any_thread } -> std::convertible_to<bool>;
                })
    return O::any_thread;
  return false;
}();

}  // namespace block_streamer::inline v1
