// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The 2-norm of all gradients taken as one vector; undefined ones count as zero.
/// Each tensor's norm is taken in fp32, their sum of squares in double on the host.
/// **Cost.** One host wait per device; not finite if any gradient is not.
[[nodiscard]] inline double global_gradient_norm(std::span<const at::Tensor> gradients) {
  const c10::NoGradGuard no_grad;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::vector<at::Tensor>> norms;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    norms[{gradient.device().type(), gradient.device().index()}].push_back(at::linalg_vector_norm(
        gradient, 2, at::OptionalIntArrayRef{}, false, at::kFloat));  // enqueued; read below
  }
  double sum = 0;
  for (const auto& [device, own] : norms) {
    const at::Tensor host = at::stack(own).to(at::kCPU);
    const float* values = host.const_data_ptr<float>();
    for (std::int64_t i = 0; i < host.numel(); ++i) sum += std::pow(double{values[i]}, 2);
  }
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
