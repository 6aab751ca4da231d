// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/gradient_node.hpp>
#include <block_streamer/block/projection.hpp>
#include <block_streamer/block/weights.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Which weights of its block a gated MLP is made of.
struct SwigluWeights {
  Linear gate;  ///< (I, C)
  Linear up;    ///< (I, C)
  Linear down;  ///< (C, I)
};

namespace detail {

/// Gradients of silu(gate)·up.
class GatedNode final : public GradientNode {
 public:
  GatedNode(const std::array<at::Tensor, 2>& gate_and_up, at::Tensor active)
      : GradientNode{gate_and_up} {
    for (const at::Tensor& input : gate_and_up) save(input);
    save_own(std::move(active));
  }
  [[nodiscard]] std::string name() const override { return "GatedBackward"; }

 private:
  Tensors pull(const Tensors& gradients, const Tensors& saved) override {
    const at::Tensor &gradient = gradients[0], &gate = saved[0], &up = saved[1];
    Tensors result(2);
    if (wants(0)) result[0] = at::silu_backward(gradient * up, gate);
    if (wants(1)) result[1] = gradient * own(0);
    return result;
  }
};

/// silu(gate)·up, of equal shapes.
[[nodiscard]] inline at::Tensor gated(const at::Tensor& gate, const at::Tensor& up) {
  at::Tensor output, active;
  {
    const PlainMath plain;
    active = at::silu(gate);
    output = active * up;
  }
  const std::array inputs{gate, up};
  if (is_recorded(inputs)) append_output(output, make_node<GatedNode>(inputs, active));
  return output;
}

}  // namespace detail

/// @brief down(silu(gate(x)) · up(x)), all in x's type. x: (B,T,C); result alike.
[[nodiscard]] inline at::Tensor swiglu(const Weights& weights, const SwigluWeights& which,
                                       const at::Tensor& x) {
  const auto [gate, up] = project_all<2>(weights, {which.gate, which.up}, x);  // (B,T,I) each
  return project(weights, which.down, detail::gated(gate, up));
}

}  // namespace block_streamer::inline v1
