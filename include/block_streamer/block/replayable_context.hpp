// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A context that a recorded pass can be given anew for each replay: what changes from pass
/// to pass lies in tensors. @see CapturedForward
/// - `replayed()`: where they are, in an order that does not change; undefined ones keep their
/// place. A copy of the context has tensors of its own.
/// - `replays_as(other)`: everything but these tensors' values is alike, so that a pass recorded
/// with one serves the other. A context that no recorded pass can serve is unlike itself.
template <class C>
concept replayable_context = std::copyable<C> && requires(C& context, const C& constant) {
  { context.replayed() } -> std::same_as<std::vector<at::Tensor*>>;
  { constant.replays_as(constant) } -> std::same_as<bool>;
};

}  // namespace block_streamer::inline v1
