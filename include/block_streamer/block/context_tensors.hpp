// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A context with tensors that blocks compute with and whose gradients are wanted, such as
/// what a list is conditioned on. What a context does not name has no gradient.
/// - `tensors()`: where they are, in an order that does not change; undefined ones keep their
/// place. A copy of the context has tensors of its own, so that a recompute may put others there.
template <class C>
concept context_with_tensors = requires(C& context) {
  { context.tensors() } -> std::same_as<std::vector<at::Tensor*>>;
};

/// @brief The tensors that a context names; none, if it is of another kind.
template <class Context>
[[nodiscard]] std::vector<at::Tensor*> tensors_of([[maybe_unused]] Context& context) {
  if constexpr (context_with_tensors<Context>) {
    return context.tensors();
  } else {
    return {};
  }
}

/// @brief One of them needs a gradient.
template <class Context>
[[nodiscard]] bool needs_gradient(Context& context) {
  for (const at::Tensor* tensor : tensors_of(context)) {
    if (tensor->defined() && tensor->requires_grad()) return true;
  }
  return false;
}

}  // namespace block_streamer::inline v1
