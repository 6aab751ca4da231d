// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/weights.hpp>
#include <block_streamer/layers/linear.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/silu.h>

namespace block_streamer::inline v1 {

/// Which weights of its block a gated MLP is made of.
struct SwigluWeights {
  Linear gate;  ///< (I, C)
  Linear up;    ///< (I, C)
  Linear down;  ///< (C, I)
};

/// @brief down(silu(gate(x)) · up(x)), all in x's type. x: (B,T,C); result alike.
[[nodiscard]] inline at::Tensor swiglu(const Weights& weights, const SwigluWeights& which,
                                       const at::Tensor& x) {
  const at::Tensor gate = at::silu(apply(weights, which.gate, x));  // (B,T,I)
  return apply(weights, which.down, gate * apply(weights, which.up, x));
}

}  // namespace block_streamer::inline v1
