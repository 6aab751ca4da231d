// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/gradient_node.hpp>
#include <block_streamer/layers/rotary.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace block_streamer::inline v1 {

namespace detail {

/// (B,T,N,D) ↔ (B,N,T,D), a view.
[[nodiscard]] inline at::Tensor swapped(const at::Tensor& x) {
  return at::as_strided(x, {x.size(0), x.size(2), x.size(1), x.size(3)},
                        {x.stride(0), x.stride(2), x.stride(1), x.stride(3)});
}

/// Backward of split_heads: turns back and joins.
class SplitHeadsNode final : public GradientNode {
 public:
  SplitHeadsNode(const at::Tensor& x, const RotaryTable* rotary)
      : GradientNode{{&x, 1}}, sizes_{x.sizes().vec()} {
    if (rotary != nullptr) rotary_ = *rotary;
  }
  [[nodiscard]] std::string name() const override { return "SplitHeadsBackward"; }

 private:
  Tensors pull(const Tensors& gradients, const Tensors&) override {
    at::Tensor gradient = swapped(gradients[0]);  // (B,T,N,D)
    if (rotary_) gradient = rotate_back_half_split(gradient, *rotary_);
    return {reshaped(gradient, sizes_)};
  }

  std::vector<std::int64_t> sizes_;
  std::optional<RotaryTable> rotary_;
};

/// Backward of merge_heads.
class MergeHeadsNode final : public GradientNode {
 public:
  explicit MergeHeadsNode(const at::Tensor& x)
      : GradientNode{{&x, 1}}, split_{x.size(0), x.size(2), x.size(1), x.size(3)} {}
  [[nodiscard]] std::string name() const override { return "MergeHeadsBackward"; }

 private:
  Tensors pull(const Tensors& gradients, const Tensors&) override {
    return {swapped(reshaped(gradients[0], split_))};
  }

  std::vector<std::int64_t> split_;  ///< (B,T,N,D)
};

}  // namespace detail

/// @brief Makes heads the second dimension, and turns them where there is a table.
/// **Shapes.** x: (B·T,N·D) or (B,T,N,D); result: (B,N,T,D), without a table over x's memory.
/// @param rotary  of the tokens, or null. Not to be written while a graph of the result lives.
[[nodiscard]] inline at::Tensor split_heads(const at::Tensor& x, std::int64_t batch,
                                            std::int64_t head_dim, const RotaryTable* rotary) {
  at::Tensor output;
  {
    const detail::PlainMath plain;
    output = x.dim() == 4
                 ? x
                 : detail::reshaped(x, {batch, x.size(0) / batch, -1, head_dim});  // (B,T,N,D)
    if (rotary != nullptr) output = rotate_half_split(output, *rotary);
    output = detail::swapped(output);  // (B,N,T,D)
  }
  if (detail::is_recorded({&x, 1}))
    detail::append_output(output, detail::make_node<detail::SplitHeadsNode>(x, rotary));
  return output;
}

/// @brief Joins what attention gave. x: (B,N,T,D); result: (B·T,N·D), over x's memory if that
/// allows it.
[[nodiscard]] inline at::Tensor merge_heads(const at::Tensor& x) {
  at::Tensor output;
  {
    const detail::PlainMath plain;
    output = detail::reshaped(detail::swapped(x), {x.size(0) * x.size(2), x.size(1) * x.size(3)});
  }
  if (detail::is_recorded({&x, 1}))
    detail::append_output(output, detail::make_node<detail::MergeHeadsNode>(x));
  return output;
}

}  // namespace block_streamer::inline v1
