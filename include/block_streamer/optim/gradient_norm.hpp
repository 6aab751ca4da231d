// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The 2-norm of all gradients taken as one vector; undefined ones count as zero.
/// Each tensor's norm is taken in fp32, their sum of squares in double on the host.
/// **Cost.** One host wait per tensor's device; not finite if any gradient is not.
[[nodiscard]] inline double global_gradient_norm(std::span<const at::Tensor> gradients) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    norms.push_back(at::linalg_vector_norm(gradient, 2, at::OptionalIntArrayRef{}, false,
                                           at::kFloat));  // enqueued; read below
  }
  double sum = 0;
  for (const at::Tensor& norm : norms) sum += std::pow(norm.item<double>(), 2);
  return std::sqrt(sum);
}

/// @brief The factor that brings a norm down to `max_norm`: what StepContext::gradient_scale is
/// multiplied by. 1 if it is small enough already. As torch.nn.utils.clip_grad_norm_.
/// @pre norm is finite and max_norm > 0.
[[nodiscard]] inline double clip_factor(double norm, double max_norm) {
  expects(std::isfinite(norm), "a gradient norm that is not finite cannot be clipped");
  expects(max_norm > 0, "the largest gradient norm is positive");
  const double factor = max_norm / (norm + 1e-6);
  return factor < 1 ? factor : 1;
}

}  // namespace block_streamer::inline v1
