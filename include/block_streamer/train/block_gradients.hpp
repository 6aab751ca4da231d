// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/masters.hpp>
#include <block_streamer/train/gradient_sum.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What one block's backward gives; undefined where nothing reached.
struct PulledGradients {
  at::Tensor input;
  std::vector<std::uint32_t> masters;  ///< whose weights in this block train
  std::vector<at::Tensor> trained;     ///< the gradients of those weights
  std::vector<at::Tensor> adapters;    ///< of the block's adapters, in their order
  std::vector<at::Tensor> context;     ///< of the context's tensors, in their order
};

/// @brief The gradients of one block's parameters, summed over the micro-batches as they come: in
/// the types and the order in which a .grad sums those of several backwards, so the bits are the
/// same.
/// **Cost.** One block's gradients, from the second micro-batch on in the masters' type, beside
/// those of the micro-batch that is added.
class BlockGradients {
 public:
  /// @param masters  themselves, that is after the visit's end; may be null if none trains.
  void add(PulledGradients pulled, const Masters* masters) {
    const c10::NoGradGuard no_grad;
    any_ = true;
    masters_ = std::move(pulled.masters);
    trained_.resize(pulled.trained.size());
    adapters_.resize(pulled.adapters.size());
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      trained_[i].add(std::move(pulled.trained[i]), (*masters)[masters_[i]].tensor.scalar_type());
    }
    for (std::size_t i = 0; i < adapters_.size(); ++i)
      adapters_[i].add(std::move(pulled.adapters[i]));
  }

  /// @brief Something was added.
  [[nodiscard]] bool any() const noexcept { return any_; }
  [[nodiscard]] std::span<const std::uint32_t> masters() const noexcept { return masters_; }
  [[nodiscard]] std::vector<at::Tensor> take_trained() { return tensors(trained_); }
  [[nodiscard]] std::vector<at::Tensor> take_adapters() { return tensors(adapters_); }

 private:
  [[nodiscard]] static std::vector<at::Tensor> tensors(std::vector<GradientSum>& sums) {
    std::vector<at::Tensor> taken;
    for (GradientSum& sum : sums) taken.push_back(sum.take());
    return taken;
  }

  bool any_ = false;
  std::vector<std::uint32_t> masters_;
  std::vector<GradientSum> trained_;
  std::vector<GradientSum> adapters_;
};

}  // namespace block_streamer::inline v1
