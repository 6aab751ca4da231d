// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/masters.hpp>
#include <block_streamer/train/gradient_ledger.hpp>
#include <block_streamer/train/gradient_route.hpp>
#include <block_streamer/train/step_pass.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::detail {

/// @brief While it lives parameters have accumulators that know the stream of the recording: one
/// that an earlier graph holds knows another stream, and the engine would make that wait for what
/// is only recorded.
class FreshAccumulators {
 public:
  explicit FreshAccumulators(std::span<const at::Tensor> parameters)
      : parameters_{parameters.begin(), parameters.end()} {
    for (const at::Tensor& parameter : parameters_) {
      callers_.push_back(torch::autograd::impl::try_get_grad_accumulator(parameter));
      torch::autograd::impl::set_grad_accumulator(parameter, {});
    }
  }
  FreshAccumulators(const FreshAccumulators&) = delete;
  FreshAccumulators& operator=(const FreshAccumulators&) = delete;
  ~FreshAccumulators() {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      torch::autograd::impl::set_grad_accumulator(parameters_[i], callers_[i]);
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::shared_ptr<torch::autograd::Node>> callers_;
};

/// @brief The adapters' gradients of a recorded step: where each replay writes them, and how they
/// get to .grad.
class StepGradients {
 public:
  /// @throws as expect_no_hooks().
  template <class Blocks>
  explicit StepGradients(const Blocks& blocks) : trains_{trains_of(blocks)} {
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const at::Tensor& parameter : blocks.adapter_parameters(b)) {
        if (parameter.requires_grad() && place_of(parameter) == parameters_.size())
          parameters_.push_back(parameter);
      }
    }
    expect_no_hooks();
    clear();
  }

  /// @throws UnsupportedError if hooks are to see a gradient.
  void expect_no_hooks() const {
    for (const at::Tensor& parameter : parameters_) {
      if (!torch::autograd::impl::hooks(parameter).empty() ||
          torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr) {
        throw step_refusal("a parameter has hooks");
      }
    }
  }

  /// @brief What trains, each once.
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// @brief The same parameters train now.
  template <class Blocks>
  [[nodiscard]] bool trains_alike(const Blocks& blocks) const {
    return trains_ == trains_of(blocks);
  }
  /// @brief A ledger that gives everything back. Lives as long as the blocks' parameters.
  template <class Blocks>
  [[nodiscard]] static GradientLedger make_ledger(const Blocks& blocks, const Masters* masters) {
    std::vector<GradientLedger::Block> known;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      known.push_back({blocks.parameters(b), blocks.owned_masters(b), {}});
      for (const at::Tensor& parameter : known.back().parameters)
        known.back().routes.push_back(parameter.requires_grad() ? GradientRoute::accumulate
                                                                : GradientRoute::drop);
    }
    return {masters, std::move(known), nullptr};
  }
  void clear() { places_.assign(parameters_.size(), at::Tensor{}); }
  /// @brief Takes what a backward gave: these tensors are the places from now on.
  void take(GradientLedger& ledger) {
    clear();
    for (std::size_t b = 0; b < ledger.block_count(); ++b) {
      for (std::size_t i = 0; i < ledger.results()[b].size(); ++i) {
        at::Tensor gradient = std::move(ledger.results()[b][i]);
        if (!gradient.defined()) continue;
        const std::size_t p = place_of(ledger.parameters(b)[i]);
        at::Tensor& place = places_[p];
        place = place.defined() ? at::add(place, gradient)
                                : as_grad_of(parameters_[p], std::move(gradient));
      }
    }
  }

  /// @brief A .grad that is still what the replay before wrote moves out of its way.
  void save_earlier() {
    for (std::size_t p = 0; p < places_.size(); ++p) {
      at::Tensor& grad = parameters_[p].mutable_grad();
      if (grad.defined() && places_[p].defined() && grad.is_alias_of(places_[p]))
        grad = grad.clone();
    }
  }
  /// @brief After a replay: what a backward does.
  void add_to_parameters() {
    for (std::size_t p = 0; p < places_.size(); ++p) {
      if (!places_[p].defined()) continue;
      at::Tensor& grad = parameters_[p].mutable_grad();
      if (grad.defined()) {
        grad.add_(places_[p]);
      } else {
        grad = places_[p];
      }
    }
  }

 private:
  template <class Blocks>
  [[nodiscard]] static std::vector<bool> trains_of(const Blocks& blocks) {
    std::vector<bool> trains;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const at::Tensor& parameter : blocks.parameters(b))
        trains.push_back(parameter.requires_grad());
    }
    return trains;
  }
  [[nodiscard]] std::size_t place_of(const at::Tensor& parameter) const {
    const auto same = [&](const at::Tensor& known) { return known.is_same(parameter); };
    return static_cast<std::size_t>(std::ranges::find_if(parameters_, same) - parameters_.begin());
  }
  /// As the engine keeps it: nobody else's, and laid out as the parameter.
  [[nodiscard]] static at::Tensor as_grad_of(const at::Tensor& parameter, at::Tensor gradient) {
    if (gradient.use_count() == 1 && gradient.storage().use_count() == 1 &&
        gradient.strides() == parameter.strides()) {
      return gradient;
    }
    return at::empty_strided(parameter.sizes(), parameter.strides(), gradient.options())
        .copy_(gradient);
  }

  std::vector<bool> trains_;  ///< per block and parameter, when it was recorded
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> places_;  ///< of each; undefined: no gradient reaches it
};

}  // namespace block_streamer::inline v1::detail
