// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>

#include <utility>

namespace block_streamer::inline v1 {

/// @brief Gradients of one tensor, summed as they come, as autograd sums those of its uses.
/// @pre grad mode is off where one is added.
class GradientSum {
 public:
  /// @param gradient  may be undefined. @param type  what the sum of several is taken in.
  void add(at::Tensor gradient, at::ScalarType type) {
    if (!gradient.defined()) return;
    if (!sum_.defined()) {
      sum_ = std::move(gradient);
    } else if (own_) {
      sum_.add_(gradient.to(type));
    } else {
      sum_ = at::add(sum_.to(type), gradient.to(type));
      own_ = true;
    }
  }
  /// @brief The sum of several is taken in their own type.
  void add(at::Tensor gradient) {
    if (!gradient.defined()) return;
    const at::ScalarType type = gradient.scalar_type();  // before it is moved from
    add(std::move(gradient), type);
  }
  /// @brief Undefined if nothing was added.
  [[nodiscard]] at::Tensor take() noexcept {
    own_ = false;
    return std::exchange(sum_, at::Tensor{});
  }

 private:
  at::Tensor sum_;
  bool own_ = false;  ///< a first gradient may be shared with others
};

}  // namespace block_streamer::inline v1
