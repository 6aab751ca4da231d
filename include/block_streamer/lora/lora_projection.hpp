// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/weights.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>

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
    expects(a_.dim() == 2 && b_.dim() == 2 && a_.size(0) == b_.size(1),
            "LoRA factors are A: (rank, in) and B: (out, rank)");
    expects(a_.scalar_type() == b_.scalar_type(), "LoRA factors have one dtype");
    expects(dropout >= 0 && dropout < 1, "LoRA dropout lies in [0, 1)");
  }

  [[nodiscard]] at::Tensor add(const at::Tensor& input, at::Tensor output,
                               bool training) const override {
    at::Tensor x = input.to(a_.scalar_type());  // (…, in)
    if (training && dropout_ > 0) x = at::dropout(x, dropout_, true);
    at::Tensor delta = at::linear(at::linear(x, a_), b_);  // (…, out)
    // In place: nothing saves delta for backward, and the sum commutes bit for bit.
    delta.mul_(scale_);
    if (output.scalar_type() == at::kDouble) return output.add(delta);
    return delta.add_(output).to(output.scalar_type());
  }

  [[nodiscard]] double scale() const noexcept { return scale_; }
  [[nodiscard]] double dropout() const noexcept { return dropout_; }

 private:
  at::Tensor a_;
  at::Tensor b_;
  double scale_;
  double dropout_;
};

}  // namespace block_streamer::inline v1
