// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace block_streamer::inline v1 {

/// @brief Root-mean-square norm over the last dimension, as Llama, Qwen3 and GLM compute it: the
/// normalisation in float32, rounded to x's type, then times the weight in that type (two
/// roundings; gpt-oss multiplies in float32 instead).
/// **Shapes.** x: (…, n); weight: (n); result: (…, n), in the type of weight · x.
[[nodiscard]] inline at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                         double epsilon) {
  const at::Tensor wide = x.to(at::kFloat);                            // (…, n)
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);  // (…, 1)
  return weight * (wide * (variance + epsilon).rsqrt()).to(x.scalar_type());
}

}  // namespace block_streamer::inline v1
