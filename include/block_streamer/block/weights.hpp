// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace block_streamer::inline v1 {

/// @brief What LoRA adds to x·Wᵀ: scale·dropout(x)·Aᵀ·Bᵀ, computed in the type of A and B.
struct LowRankTerm {
  at::Tensor a;        ///< (rank, in), leaf tensor
  at::Tensor b;        ///< (out, rank), leaf tensor of the same type
  double scale = 1;    ///< fixed, so that a recompute uses the same
  double dropout = 0;  ///< probability in [0, 1), active while training
};

/// @brief What may be woven into a linear map: an adapter that adds to x·Wᵀ. Looked up by the
/// weight's index in a table that is built at binding, so a visit does no name look-up. LoRA is the
/// model of it.
class ProjectionAdapter {
 public:
  ProjectionAdapter() = default;
  ProjectionAdapter(const ProjectionAdapter&) = delete;
  ProjectionAdapter& operator=(const ProjectionAdapter&) = delete;
  virtual ~ProjectionAdapter() = default;
  /// @param input   (…, in), what the linear map was applied to.
  /// @param output  (…, out), what it gave.
  /// @returns output plus the adapter's own contribution, in output's dtype.
  /// @param training  true in a training forward and its recompute: dropout is active.
  [[nodiscard]] virtual at::Tensor add(const at::Tensor& input, at::Tensor output,
                                       bool training) const = 0;
  /// @brief Not null if add() gives output plus this term and nothing else: linear maps then
  /// compute the term and its gradients along with their own, and need not call add().
  /// **Lifetime.** The adapter's.
  [[nodiscard]] virtual const LowRankTerm* low_rank() const noexcept { return nullptr; }
};

/// @brief The tensors of one visit, by the index that the block gave them in weight_specs().
/// **Lifetime.** Views over a slot: valid until the visit ends; they must not be kept, saved for
/// backward or written.
class Weights {
 public:
  /// @param adapters  one entry per tensor (null: none), or an empty span.
  explicit Weights(std::span<const at::Tensor> tensors,
                   std::span<const ProjectionAdapter* const> adapters = {},
                   bool training = false) noexcept
      : tensors_{tensors}, adapters_{adapters}, training_{training} {}

  [[nodiscard]] const at::Tensor& operator[](std::size_t index) const noexcept {
    return tensors_[index];
  }
  [[nodiscard]] std::size_t size() const noexcept { return tensors_.size(); }
  /// @brief The adapter woven into the linear map with weight `index`, or nullptr.
  [[nodiscard]] const ProjectionAdapter* adapter(std::size_t index) const noexcept {
    return adapters_.empty() ? nullptr : adapters_[index];
  }
  /// @brief True in a training forward and its recompute.
  [[nodiscard]] bool training() const noexcept { return training_; }

 private:
  std::span<const at::Tensor> tensors_;
  std::span<const ProjectionAdapter* const> adapters_;
  bool training_;
};

}  // namespace block_streamer::inline v1
