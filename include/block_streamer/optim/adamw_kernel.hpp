// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

namespace block_streamer::inline v1 {

/// Hyperparameters as torch.optim.AdamW names and defaults them; the learning rate is a step's.
struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;  ///< decoupled: the parameter shrinks by learning rate x this
  bool decay_vectors = true;   ///< false: parameters of fewer than two dimensions do not shrink
  bool allow_fused = true;     ///< false: always the plain operations
};

namespace detail {

/// One parameter's turn in a step.
struct AdamWItem {
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq;
  std::uint64_t step = 1;  ///< how many updates this one has had, this one included
};

/// True if LibTorch has a fused kernel for fp32 tensors on this device: tried on one element.
[[nodiscard]] inline bool probe_fused_adamw(const at::Device& device) {
  try {
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
    const at::Tensor one = at::ones({1}, options);
    const at::Tensor m = at::zeros({1}, options);
    const at::Tensor v = at::zeros({1}, options);
    const at::Tensor step = at::ones({}, options);
    at::_fused_adamw_({one}, {at::ones({1}, options)}, {m}, {v}, {}, {step}, 0.1, 0.9, 0.999, 0.0,
                      1e-8, false, false);
    return m.item<float>() != 0.0F;
  } catch (const c10::Error&) {
    return false;
  }
}

/// All items are fp32 on one device. Writes the scaled gradients back if `scale` is not 1.
inline void fused_adamw(const std::vector<AdamWItem>& items, const AdamWOptions& options,
                        double learning_rate, double scale) {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
  std::map<std::uint64_t, at::Tensor> step_tensors;  // counts differ only if gradients were missing
  for (const AdamWItem& item : items) {
    parameters.push_back(item.parameter);
    gradients.push_back(item.gradient);
    exp_avgs.push_back(item.exp_avg);
    exp_avg_sqs.push_back(item.exp_avg_sq);
    at::Tensor& step = step_tensors[item.step];
    if (!step.defined())
      step = at::full({}, static_cast<double>(item.step),
                      item.parameter.options().requires_grad(false));
    steps.push_back(step);
  }
  if (scale != 1) at::_foreach_mul_(gradients, scale);
  // The fused kernel writes without saying so; versions are how autograd, and whoever keeps copies
  // of trainable masters, notice.
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
  }
  at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, {}, steps, learning_rate,
                    options.beta1, options.beta2, options.weight_decay, options.epsilon, false,
                    false);
}

/// The operations of torch.optim.AdamW(foreach=False, fused=False) in its order, on fp32 copies
/// where the parameter is not fp32.
inline void plain_adamw(const AdamWItem& item, const AdamWOptions& options, double learning_rate,
                        double scale) {
  at::Tensor gradient = item.gradient.to(at::kFloat);
  if (scale != 1) gradient = gradient.mul(scale);
  at::Tensor parameter = item.parameter.to(at::kFloat);  // itself if it is fp32
  const auto step = static_cast<double>(item.step);
  const double correction1 = 1 - std::pow(options.beta1, step);
  const double correction2 = std::sqrt(1 - std::pow(options.beta2, step));
  if (options.weight_decay != 0) parameter.mul_(1 - learning_rate * options.weight_decay);
  at::Tensor exp_avg = item.exp_avg;
  at::Tensor exp_avg_sq = item.exp_avg_sq;
  exp_avg.lerp_(gradient, 1 - options.beta1);
  exp_avg_sq.mul_(options.beta2).addcmul_(gradient, gradient, 1 - options.beta2);
  const at::Tensor denominator = exp_avg_sq.sqrt().div_(correction2).add_(options.epsilon);
  parameter.addcdiv_(exp_avg, denominator, -(learning_rate / correction1));
  if (!parameter.is_same(item.parameter)) item.parameter.copy_(parameter);
}

}  // namespace detail
}  // namespace block_streamer::inline v1
