// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/gradient_node.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rms_norm.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// @brief Gradients of w·u with u = x·r and r = 1/√(mean(x²) + ε) over the last dimension: of x,
/// r·(gw − u·mean(gw·u)) in float32; of w, g·u.
class RmsNormNode final : public GradientNode {
 public:
  /// @param inverse  r: (…, 1), f32.
  RmsNormNode(const std::array<at::Tensor, 2>& inputs, at::Tensor inverse) : GradientNode{inputs} {
    for (const at::Tensor& input : inputs) save(input);
    save_own(std::move(inverse));
  }
  [[nodiscard]] std::string name() const override { return "RmsNormBackward"; }

 private:
  Tensors pull(const Tensors& gradients, const Tensors& saved) override {
    const at::Tensor &gradient = gradients[0], &x = saved[0], &weight = saved[1];
    const at::Tensor unit = cast(x, at::kFloat) * own(0);  // (…, n)
    Tensors result(2);
    if (wants(0)) {
      const at::Tensor of_unit = cast(gradient * weight, at::kFloat);        // (…, n)
      const at::Tensor along = (of_unit * unit).mean(-1, /*keepdim=*/true);  // (…, 1)
      result[0] = cast(of_unit.addcmul(unit, along, -1).mul_(own(0)), x.scalar_type());
    }
    if (wants(1))
      result[1] = (gradient * cast(unit, x.scalar_type())).reshape({-1, x.size(-1)}).sum(0);  // (n)
    return result;
  }
};

}  // namespace detail

/// @brief Root-mean-square norm over the last dimension, as Llama, Qwen3 and GLM compute it: the
/// normalisation in float32, rounded to x's type, then times the weight in that type (two
/// roundings; gpt-oss multiplies in float32 instead).
/// On CUDA one fused kernel does it, with a single rounding at the end: closer to the exact value,
/// and a tenth of the launches.
/// **Shapes.** x: (…, n); weight: (n); result: (…, n), in the type of weight · x.
[[nodiscard]] inline at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                         double epsilon) {
  if (x.is_cuda()) return at::rms_norm(x, {x.size(-1)}, weight, epsilon);
  at::Tensor output, inverse;
  {
    const detail::PlainMath plain;
    const at::Tensor wide = detail::cast(x, at::kFloat);                      // (…, n)
    inverse = wide.pow(2).mean(-1, /*keepdim=*/true).add_(epsilon).rsqrt_();  // (…, 1)
    output = weight * detail::cast(wide * inverse, x.scalar_type());
  }
  const std::array inputs{x, weight};
  if (detail::is_recorded(inputs))
    detail::append_output(output, detail::make_node<detail::RmsNormNode>(inputs, inverse));
  return output;
}

}  // namespace block_streamer::inline v1
