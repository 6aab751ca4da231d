// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/weights.hpp>
#include <block_streamer/core/expects.hpp>

#include <block_streamer/lora/lora_node.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>

#include <cmath>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Low-rank adapter of one linear map: output + scale·B·A·dropout(x), with PEFT's
/// arithmetic. x is cast to the adapter's dtype (fp32), everything up to the sum happens there, and
/// the sum is cast back to the output's dtype. With B = 0 the output keeps its bits, except that a
/// -0.0 may become +0.0 (as in PEFT).
/// **Threads.** Immutable but for the two leaf tensors; add() may be called again in a recompute
/// and then gives the same bits if the random state is replayed.
/// **Cost.** Two products of 2·tokens·rank·(in + out) operations in all; one temporary (…, out) in
/// fp32, which is reused for the sum; where the base is not fp32 one fp32 copy of x.
class LoraProjection final : public ProjectionAdapter {
 public:
  /// @param a  (rank, in), leaf tensor; @param b  (out, rank), leaf tensor of the same dtype.
  /// @param dropout  probability in [0, 1).
  LoraProjection(at::Tensor a, at::Tensor b, double scale, double dropout)
      : a_{std::move(a)}, b_{std::move(b)}, scale_{scale}, dropout_{dropout} {
    int exponent = 0;
    exact_scale_ = std::frexp(std::abs(scale), &exponent) == 0.5;
    expects(a_.dim() == 2 && b_.dim() == 2 && a_.size(0) == b_.size(1),
            "LoRA factors are A: (rank, in) and B: (out, rank)");
    expects(a_.scalar_type() == b_.scalar_type(), "LoRA factors have one dtype");
    expects(dropout >= 0 && dropout < 1, "LoRA dropout lies in [0, 1)");
  }

  [[nodiscard]] at::Tensor add(const at::Tensor& input, at::Tensor output,
                               bool training) const override {
    if (training && dropout_ > 0) {
      return detail::add_low_rank(at::dropout(input.to(a_.scalar_type()), dropout_, true), output,
                                  a_, b_, scale_, exact_scale_);
    }
    return detail::add_low_rank(input, output, a_, b_, scale_, exact_scale_);
  }

  [[nodiscard]] double scale() const noexcept { return scale_; }
  [[nodiscard]] double dropout() const noexcept { return dropout_; }

 private:
  at::Tensor a_;
  at::Tensor b_;
  double scale_;
  double dropout_;
  bool exact_scale_;  ///< a power of two
};

}  // namespace block_streamer::inline v1
