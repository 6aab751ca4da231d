// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/weights.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>

#include <utility>

namespace block_streamer::inline v1 {

/// @brief Low-rank adapter of one linear map: output + scale·B·A·dropout(x), with PEFT's
/// arithmetic. x is cast to the adapter's dtype (fp32), everything up to the sum happens there, and
/// the sum is cast back to the output's dtype. With B = 0 the output keeps its bits, except that a
/// -0.0 may become +0.0 (as in PEFT).
/// **Threads.** Immutable but for the two leaf tensors; the term may be computed again in a
/// recompute and then has the same bits if the random state is replayed.
/// From 1,024 bf16 rows on a GPU on, without dropout, the products take fp32 factors as two bf16
/// ones each (16 of 24 bits): no copy of x in fp32, no temporary, and the units for bf16 do it.
/// **Cost.** Else: two products of 2·tokens·rank·(in + out) operations in all; one temporary (…,
/// out) in fp32; where the base is not fp32 one fp32 copy of x, which maps of one x share.
class LoraProjection final : public ProjectionAdapter {
 public:
  /// @param a  (rank, in), leaf tensor; @param b  (out, rank), leaf tensor of the same dtype.
  /// @param dropout  probability in [0, 1).
  LoraProjection(at::Tensor a, at::Tensor b, double scale, double dropout)
      : term_{std::move(a), std::move(b), scale, dropout} {
    expects(term_.a.dim() == 2 && term_.b.dim() == 2 && term_.a.size(0) == term_.b.size(1),
            "LoRA factors are A: (rank, in) and B: (out, rank)");
    expects(term_.a.scalar_type() == term_.b.scalar_type(), "LoRA factors have one dtype");
    expects(dropout >= 0 && dropout < 1, "LoRA dropout lies in [0, 1)");
  }

  /// @brief The term as a chain of single operations, for callers that have an output already.
  [[nodiscard]] at::Tensor add(const at::Tensor& input, at::Tensor output,
                               bool training) const override {
    at::Tensor x = input.to(term_.a.scalar_type());
    if (training && term_.dropout > 0) x = at::dropout(x, term_.dropout, /*train=*/true);
    const at::Tensor term = at::linear(at::linear(x, term_.a), term_.b);  // (…, out)
    return at::add(output, term, term_.scale).to(output.scalar_type());
  }
  [[nodiscard]] const LowRankTerm* low_rank() const noexcept override { return &term_; }

  [[nodiscard]] double scale() const noexcept { return term_.scale; }
  [[nodiscard]] double dropout() const noexcept { return term_.dropout; }

 private:
  LowRankTerm term_;
};

}  // namespace block_streamer::inline v1
