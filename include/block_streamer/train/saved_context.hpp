// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/context_tensors.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A context as it waits for the backward: a copy whose tensors share memory and version
/// counter with the caller's, and nothing of its graph.
template <class Context>
class SavedContext {
 public:
  /// @throws ContractViolation if a copy of the context shares its tensors.
  explicit SavedContext(Context& context) : context_{context} {
    const auto original = tensors_of(context), own = tensors_of(context_);
    for (std::size_t i = 0; i < own.size(); ++i) {
      expects(own[i] != original[i], "a copy of a context has tensors of its own");
      at::Tensor& tensor = *own[i];
      needed_.push_back(tensor.defined() && tensor.requires_grad());
      if (tensor.defined()) tensor = tensor.detach();
      kept_.push_back(tensor);
      versions_.push_back(version_of(tensor));
    }
  }

  [[nodiscard]] std::size_t size() const noexcept { return kept_.size(); }
  /// @brief The tensor needs a gradient.
  [[nodiscard]] bool needed(std::size_t tensor) const { return needed_[tensor]; }
  [[nodiscard]] bool any_needed() const noexcept {
    for (const bool needed : needed_) {
      if (needed) return true;
    }
    return false;
  }
  /// @throws ContractViolation naming a tensor that was changed since.
  void check_unchanged() const {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      if (version_of(kept_[i]) == versions_[i]) continue;
      throw ContractViolation{"tensor " + std::to_string(i) +
                              " of the context was changed in place between forward and backward"};
    }
  }

  /// @brief The context for one recompute: tensors that need a gradient are leaves of its graph.
  class Loan {
   public:
    explicit Loan(SavedContext& saved) : saved_{saved}, leaves_{saved.kept_} {
      const auto places = tensors_of(saved_.context_);
      for (std::size_t i = 0; i < leaves_.size(); ++i) {
        if (!saved_.needed_[i]) continue;
        leaves_[i] = leaves_[i].detach().set_requires_grad(true);
        *places[i] = leaves_[i];
      }
    }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan() {
      const auto places = tensors_of(saved_.context_);
      for (std::size_t i = 0; i < leaves_.size(); ++i) *places[i] = saved_.kept_[i];
    }
    [[nodiscard]] Context& context() noexcept { return saved_.context_; }
    /// @brief In the order of the context's tensors.
    [[nodiscard]] const std::vector<at::Tensor>& leaves() const noexcept { return leaves_; }

   private:
    SavedContext& saved_;
    std::vector<at::Tensor> leaves_;
  };

 private:
  [[nodiscard]] static std::int64_t version_of(const at::Tensor& tensor) {
    return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
  }

  Context context_;
  std::vector<at::Tensor> kept_;
  std::vector<bool> needed_;
  std::vector<std::int64_t> versions_;
};

}  // namespace block_streamer::inline v1
