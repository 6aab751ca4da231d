// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/optim/optimizer_policy.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Hyperparameters as torch.optim.SGD names and defaults them; the learning rate is a step's.
struct SgdOptions {
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;  ///< added to the gradient: the parameter times this
  bool nesterov = false;
};

/// @brief Gradient descent with momentum, equal to torch.optim.SGD; computed in fp32 whatever the
/// parameters' dtype. Each parameter's momentum begins with its own first gradient.
/// **Threads.** Externally synchronised. **Cost.** 4 bytes of state per element with momentum, none
/// without, on the parameter's device.
class Sgd {
 public:
  explicit Sgd(SgdOptions options = {}) : options_{options} {
    expects(options.momentum >= 0 && options.weight_decay >= 0,
            "Sgd: momentum and weight decay are not negative");
    expects(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
            "Sgd: Nesterov momentum needs momentum and no dampening");
  }

  static constexpr bool any_thread = true;  ///< @see updates_on_any_thread
  [[nodiscard]] static constexpr GradientDelivery delivery() noexcept {
    return GradientDelivery::in_backward;
  }

  /// @brief Opens a step.
  void begin_step(const StepContext& context) {
    expects(!context_, "Sgd: begin_step before end_step of the last step");
    context_ = context;
    for (auto& [block, state] : blocks_) state.updated = false;
  }
  void prefetch(BlockId) noexcept {}

  /// @brief Steps one block. An undefined gradient leaves its parameter and momentum alone.
  /// @pre the same parameters in the same order at every call for a block.
  void update(BlockId block, std::span<at::Tensor> parameters, std::span<at::Tensor> gradients) {
    expects(context_.has_value(), "Sgd: update outside begin_step … end_step");
    expects(parameters.size() == gradients.size(), "Sgd: one gradient slot per parameter");
    Block& state = blocks_[block];
    expects(!state.updated, "Sgd: a block is updated once a step");
    if (state.momenta.empty()) state.momenta.resize(parameters.size());
    expects(state.momenta.size() == parameters.size(), "Sgd: the block's parameters changed");
    const c10::InferenceMode normal{false};
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (gradients[i].defined()) apply(parameters[i], gradients[i], state.momenta[i]);
    }
    state.updated = true;
  }

  void end_step() {
    expects(context_.has_value(), "Sgd: end_step without begin_step");
    context_.reset();
  }

  /// @brief The momenta of one block, in parameter order: fp32, undefined before the first
  /// gradient. Empty before the block's first update.
  [[nodiscard]] std::span<const at::Tensor> momenta(BlockId block = {}) const {
    const auto found = blocks_.find(block);
    return found == blocks_.end() ? std::span<const at::Tensor>{} : found->second.momenta;
  }
  [[nodiscard]] const SgdOptions& options() const noexcept { return options_; }

 private:
  struct Block {
    std::vector<at::Tensor> momenta;
    bool updated = false;
  };

  /// The operations of torch.optim.SGD(foreach=False, fused=False) in its order, on fp32 copies
  /// where the parameter is not fp32.
  void apply(const at::Tensor& parameter, const at::Tensor& given, at::Tensor& momentum) const {
    at::Tensor gradient = given.to(at::kFloat);
    at::Tensor value = parameter.to(at::kFloat);  // itself if it is fp32
    if (context_->gradient_scale != 1) gradient = gradient.mul(context_->gradient_scale);
    if (options_.weight_decay != 0) gradient = gradient.add(value, options_.weight_decay);
    if (options_.momentum != 0) {
      if (momentum.defined()) {
        momentum.mul_(options_.momentum).add_(gradient, 1 - options_.dampening);
      } else {
        momentum = at::clone(gradient);
      }
      gradient = options_.nesterov ? gradient.add(momentum, options_.momentum) : momentum;
    }
    value.add_(gradient, -context_->learning_rate);
    if (!value.is_same(parameter)) parameter.copy_(value);
  }

  SgdOptions options_;
  std::map<BlockId, Block> blocks_;
  std::optional<StepContext> context_;
};
static_assert(optimizer_policy<Sgd>);

}  // namespace block_streamer::inline v1
