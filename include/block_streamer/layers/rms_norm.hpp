// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rms_norm.h>

#include <cstdint>

namespace block_streamer::inline v1 {

/// @brief Root-mean-square norm over the last dimension, as Llama, Qwen3 and GLM compute it: the
/// normalisation in float32, rounded to x's type, then times the weight in that type (two
/// roundings; gpt-oss multiplies in float32 instead).
/// On CUDA one fused kernel does it, with a single rounding at the end: closer to the exact value,
/// and a tenth of the launches.
/// **Shapes.** x: (…, n); weight: (n); result: (…, n), in the type of weight · x.
[[nodiscard]] inline at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                         double epsilon) {
  if (x.is_cuda()) return at::rms_norm(x, {x.size(-1)}, weight, epsilon);
  const at::Tensor wide = x.to(at::kFloat);                            // (…, n)
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);  // (…, 1)
  return weight * (wide * (variance + epsilon).rsqrt()).to(x.scalar_type());
}

}  // namespace block_streamer::inline v1
