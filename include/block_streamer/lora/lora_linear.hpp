// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/lora/lora_projection.hpp>
#include <block_streamer/lora/options.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

namespace block_streamer::inline v1 {

/// The form of one adapted map.
struct LoraLinearOptions {
  std::uint64_t rank = 16;
  double alpha = 32;
  double dropout = 0;       ///< probability in [0, 1), on the adapter's own input, while training
  bool use_rslora = false;  ///< scale = alpha / sqrt(rank) instead of alpha / rank
};

/// @brief A frozen linear map with a LoRA adapter, for modules of one's own:
/// y = x·Wᵀ + b + scale·B·A·dropout(x), with the arithmetic of LoraProjection. In a ModuleBlock
/// everything streams, and lora_A and lora_B train.
/// Parameters: `weight` and `bias`, those it is given, which require no gradient any more;
/// `lora_A` (rank, in) and `lora_B` (out, rank), fp32 whatever the type of the weight, made by
/// PEFT's rule: A uniform within ± 1/sqrt(in), drawn from LibTorch's default generator on the CPU,
/// B zero.
/// **Shapes.** x: (…, in), in the type of the weight; result: (…, out).
class LoraLinearImpl : public torch::nn::Module {
 public:
  /// @param base_weight  (out, in), shared. @param base_bias  (out), shared, or undefined.
  /// @throws UnsupportedError for options that describe no adapter, and a rank above the map's
  /// smaller dimension.
  LoraLinearImpl(const at::Tensor& base_weight, const at::Tensor& base_bias,
                 const LoraLinearOptions& options = {})
      : scale_{lora_scale(options.alpha, options.rank, options.use_rslora)},
        dropout_{options.dropout} {
    expects(base_weight.defined() && base_weight.dim() == 2 && base_weight.is_floating_point(),
            "the weight of an adapted linear map is (out, in)");
    expects(
        !base_bias.defined() || (base_bias.dim() == 1 && base_bias.size(0) == base_weight.size(0)),
        "the bias of an adapted linear map is (out)");
    validate(LoraOptions{.rank = options.rank, .alpha = options.alpha, .dropout = options.dropout});
    const auto rank = static_cast<std::int64_t>(options.rank);
    if (rank > std::min(base_weight.size(0), base_weight.size(1)))
      throw UnsupportedError{"LoRA: rank " + std::to_string(rank) +
                             " is above what a linear map of shape (" +
                             std::to_string(base_weight.size(0)) + ", " +
                             std::to_string(base_weight.size(1)) + ") can have"};
    weight = register_parameter("weight", base_weight, /*requires_grad=*/false);
    bias = register_parameter("bias", base_bias, /*requires_grad=*/false);
    const double bound = 1 / std::sqrt(static_cast<double>(base_weight.size(1)));
    const auto on_cpu = at::TensorOptions().dtype(at::kFloat).device(at::kCPU);
    const at::Tensor a = at::empty({rank, base_weight.size(1)}, on_cpu).uniform_(-bound, bound);
    lora_a = register_parameter("lora_A", a.to(base_weight.device()));
    lora_b = register_parameter(
        "lora_B", at::zeros({base_weight.size(0), rank}, on_cpu).to(base_weight.device()));
  }
  /// @brief Takes the place of a linear map: any module with `weight` and `bias`, or its holder.
  template <class LinearModule>
  requires requires(const LinearModule& base) {
    base->weight.sizes();
    base->bias.sizes();
  }
  explicit LoraLinearImpl(const LinearModule& base, const LoraLinearOptions& options = {})
      : LoraLinearImpl{base->weight, base->bias, options} {}

  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const {
    const LoraProjection adapter{lora_a, lora_b, scale_, dropout_};
    return adapter.add(x, at::linear(x, weight, bias), is_training());
  }

  /// @brief The factor on B·A·x.
  [[nodiscard]] double scale() const noexcept { return scale_; }

  at::Tensor weight;  ///< (out, in)
  at::Tensor bias;    ///< (out), or undefined
  at::Tensor lora_a;  ///< (rank, in)
  at::Tensor lora_b;  ///< (out, rank)

 private:
  double scale_;
  double dropout_;
};
TORCH_MODULE(LoraLinear);

}  // namespace block_streamer::inline v1
