// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/weights.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>

#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Several low-rank terms on one linear map: output + Σ scale·B·A·dropout(x), with PEFT's
/// arithmetic for several active adapters: added one after another in the wider type, each with a
/// dropout of its own, and rounded to the output's type once, at the end.
/// **Threads.** Immutable but for the leaf tensors. **Cost.** Each term as a chain of single
/// operations; a single term is cheaper as a LoraProjection.
class SummedProjection final : public ProjectionAdapter {
 public:
  /// @param terms  in the order in which they are added.
  explicit SummedProjection(std::vector<LowRankTerm> terms) : terms_{std::move(terms)} {
    expects(!terms_.empty(), "a sum of low-rank terms has at least one");
  }

  [[nodiscard]] at::Tensor add(const at::Tensor& input, at::Tensor output,
                               bool training) const override {
    at::Tensor sum = output;
    for (const LowRankTerm& term : terms_) {
      at::Tensor x = input.to(term.a.scalar_type());
      if (training && term.dropout > 0) x = at::dropout(x, term.dropout, /*train=*/true);
      sum = at::add(sum, at::linear(at::linear(x, term.a), term.b), term.scale);  // (…, out)
    }
    return sum.to(output.scalar_type());
  }

 private:
  std::vector<LowRankTerm> terms_;
};

}  // namespace block_streamer::inline v1
