// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/optim/adamw_kernel.hpp>
#include <block_streamer/optim/optimizer_policy.hpp>

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief AdamW with decoupled weight decay, equal to torch.optim.AdamW; state in fp32 whatever the
/// parameters' dtype, made at a parameter's first gradient.
/// Each parameter counts its own updates, so blocks may be stepped one after another, in any order,
/// and some left out of a step, without changing anybody's bias correction.
/// **Threads.** Externally synchronised. **Cost.** 8 bytes of state per element on the parameter's
/// device; fp32 parameters go through LibTorch's fused kernel where the device has one.
class AdamW {
 public:
  /// What is kept for one parameter. Undefined tensors and step 0 until its first gradient.
  struct Moments {
    at::Tensor exp_avg, exp_avg_sq;  ///< fp32, shaped as the parameter
    std::uint64_t step = 0;          ///< updates it has had
  };

  explicit AdamW(AdamWOptions options = {}) : options_{options} {
    expects(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
            "AdamW: betas lie in [0, 1)");
    expects(options.epsilon >= 0 && options.weight_decay >= 0,
            "AdamW: epsilon and weight decay are not negative");
  }

  static constexpr bool any_thread = true;  ///< @see updates_on_any_thread
  [[nodiscard]] static constexpr GradientDelivery delivery() noexcept {
    return GradientDelivery::in_backward;
  }

  /// @brief Opens a step.
  void begin_step(const StepContext& context) {
    expects(!context_, "AdamW: begin_step before end_step of the last step");
    context_ = context;
    for (auto& [block, state] : blocks_) state.updated = false;
  }
  void prefetch(BlockId) noexcept {}

  /// @brief Steps one block. An undefined gradient leaves its parameter, moments and count alone.
  /// @pre the same parameters in the same order at every call for a block.
  void update(BlockId block, std::span<at::Tensor> parameters, std::span<at::Tensor> gradients) {
    expects(context_.has_value(), "AdamW: update outside begin_step … end_step");
    expects(parameters.size() == gradients.size(), "AdamW: one gradient slot per parameter");
    BlockState& state = blocks_[block];
    expects(!state.updated, "AdamW: a block is updated once a step");
    if (state.moments.empty()) state.moments.resize(parameters.size());
    check(state.moments, parameters, gradients);
    const c10::InferenceMode normal{false};
    const c10::NoGradGuard no_grad;
    apply(items_of(state.moments, parameters, gradients));
    state.updated = true;
  }

  void end_step() {
    expects(context_.has_value(), "AdamW: end_step without begin_step");
    context_.reset();
  }

  /// @brief One step over a flat list with the gradients in .grad: block 0 of the policy.
  void step(std::span<at::Tensor> parameters, const StepContext& context) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    begin_step(context);
    try {
      update(BlockId{0}, parameters, gradients);
    } catch (...) {
      context_.reset();
      throw;
    }
    end_step();
  }

  [[nodiscard]] const AdamWOptions& options() const noexcept { return options_; }
  /// @brief Other hyperparameters from the next step on; the state stays.
  void set_options(const AdamWOptions& options) {
    expects(!context_, "AdamW: options change between steps");
    options_ = AdamW{options}.options_;
  }

  /// @brief The moments of one block, in parameter order; empty before its first update.
  [[nodiscard]] std::span<const Moments> moments(BlockId block = {}) const {
    const auto found = blocks_.find(block);
    return found == blocks_.end() ? std::span<const Moments>{} : found->second.moments;
  }

  /// @brief Takes up the moments of an earlier run (adamw_state.hpp reads and writes them by name).
  /// @pre in parameter order, fp32; checked against the parameters at the next update.
  void set_moments(std::vector<Moments> moments, BlockId block = {}) {
    for (const Moments& own : moments) {
      expects(own.exp_avg.defined() == own.exp_avg_sq.defined() &&
                  own.exp_avg.defined() == (own.step > 0),
              "AdamW: moments are whole or absent");
      expects(!own.exp_avg.defined() || (own.exp_avg.scalar_type() == at::kFloat &&
                                         own.exp_avg_sq.scalar_type() == at::kFloat),
              "AdamW: moments are fp32");
    }
    blocks_[block].moments = std::move(moments);
  }

 private:
  struct BlockState {
    std::vector<Moments> moments;
    bool updated = false;
  };
  /// All checks before the first change, so that a refused update leaves no count behind.
  static void check(const std::vector<Moments>& moments, std::span<const at::Tensor> parameters,
                    std::span<const at::Tensor> gradients) {
    expects(moments.size() == parameters.size(), "AdamW: the block's parameters changed");
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      expects(!gradients[i].defined() || (gradients[i].sizes() == parameters[i].sizes() &&
                                          gradients[i].device() == parameters[i].device()),
              "AdamW: a gradient has its parameter's shape and device");
      expects(
          !moments[i].exp_avg.defined() || (moments[i].exp_avg.sizes() == parameters[i].sizes() &&
                                            moments[i].exp_avg.device() == parameters[i].device()),
          "AdamW: moments have their parameter's shape and device");
    }
  }

  [[nodiscard]] static std::vector<detail::AdamWItem> items_of(
      std::vector<Moments>& moments, std::span<const at::Tensor> parameters,
      std::span<const at::Tensor> gradients) {
    std::vector<detail::AdamWItem> items;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!gradients[i].defined()) continue;
      Moments& own = moments[i];
      if (!own.exp_avg.defined()) {
        const auto fp32 = parameters[i].options().dtype(at::kFloat).requires_grad(false);
        own.exp_avg = at::zeros_like(parameters[i], fp32);
        own.exp_avg_sq = at::zeros_like(parameters[i], fp32);
      }
      items.push_back({parameters[i], gradients[i], own.exp_avg, own.exp_avg_sq, ++own.step});
    }
    return items;
  }

  void apply(std::vector<detail::AdamWItem> items) {
    // By device and whether they shrink: a call of the kernel has one of each.
    std::map<std::pair<c10::DeviceIndex, bool>, std::vector<detail::AdamWItem>> fused;
    AdamWOptions undecayed = options_;
    undecayed.weight_decay = 0;
    for (detail::AdamWItem& item : items) {
      const bool decays = options_.decay_vectors || item.parameter.dim() >= 2;
      const bool fp32 =
          item.parameter.scalar_type() == at::kFloat && item.gradient.scalar_type() == at::kFloat;
      if (fp32 && fused_on(item.parameter.device()))
        fused[{item.parameter.device().index(), decays}].push_back(std::move(item));
      else
        detail::plain_adamw(item, decays ? options_ : undecayed, context_->learning_rate,
                            context_->gradient_scale);
    }
    for (const auto& [of, group] : fused)
      detail::fused_adamw(group, of.second ? options_ : undecayed, context_->learning_rate,
                          context_->gradient_scale);
  }

  [[nodiscard]] bool fused_on(const at::Device& device) {
    if (!options_.allow_fused) return false;
    const auto [entry, fresh] = fused_.try_emplace({device.type(), device.index()}, false);
    if (fresh) entry->second = detail::probe_fused_adamw(device);
    return entry->second;
  }

  AdamWOptions options_;
  std::map<BlockId, BlockState> blocks_;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, bool> fused_;
  std::optional<StepContext> context_;
};
static_assert(optimizer_policy<AdamW>);

}  // namespace block_streamer::inline v1
