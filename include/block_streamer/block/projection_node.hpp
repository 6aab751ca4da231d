// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/gradient_node.hpp>
#include <block_streamer/block/split_products.hpp>
#include <block_streamer/block/weights.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/native_dropout_backward.h>

#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::detail {

/// One of the linear maps that are applied to the same x.
struct LinearMap {
  at::Tensor weight;                  ///< (out, in)
  at::Tensor bias;                    ///< (out), or undefined
  const LowRankTerm* term = nullptr;  ///< what is added, or null
};

/// x: (…, n) as (N, n).
[[nodiscard]] inline at::Tensor as_rows(const at::Tensor& x) {
  return x.dim() == 2 ? x : reshaped(x, {-1, x.size(-1)});
}

/// x as rows, also in the type that low-rank terms compute in: cast once for all of them.
class Rows {
 public:
  explicit Rows(const at::Tensor& x) : stored_{as_rows(x)}, cast_{stored_} {}
  [[nodiscard]] const at::Tensor& stored() const noexcept { return stored_; }  ///< (N, n)
  [[nodiscard]] const at::Tensor& as(at::ScalarType dtype) {
    if (cast_.scalar_type() != dtype) cast_ = cast(stored_, dtype);
    return cast_;
  }

 private:
  at::Tensor stored_;
  at::Tensor cast_;
};

/// @brief Gradients of yᵢ = x·Wᵢᵀ + bᵢ + sᵢ·(dropout(x)·Aᵢᵀ)·Bᵢᵀ for all i at once, so that casts
/// and sums over i are shared. Inputs in order: x, then W, b, A, B of each map.
class ProjectionNode final : public GradientNode {
 public:
  /// What the forward of one map leaves for its backward.
  struct LowRank {
    at::Tensor low;   ///< dropout(x)·Aᵀ (N, rank); undefined: there is no term
    at::Tensor mask;  ///< of the dropout (N, in), or undefined
    double scale = 0;
    double kept_scale = 1;  ///< of what the dropout kept
  };

  ProjectionNode(std::span<const at::Tensor> inputs, std::vector<LowRank> terms)
      : GradientNode{inputs}, terms_{std::move(terms)} {
    for (const at::Tensor& input : inputs) save(input);
  }
  [[nodiscard]] std::string name() const override { return "ProjectionBackward"; }
  void release_variables() override {
    GradientNode::release_variables();
    terms_.clear();
  }

 private:
  static constexpr std::size_t inputs_per_map = 4;

  /// The gradient of x: what comes through the weights, in x's type, and through the terms in
  /// theirs, summed up apart.
  struct OfInput {
    at::Tensor through_weights;
    at::Tensor through_terms;
  };

  Tensors pull(const Tensors& gradients, const Tensors& saved) override {
    const at::Tensor& x = saved[0];
    Tensors result(saved.size());
    Rows rows{x};
    OfInput of_input;
    for (std::size_t i = 0; i < terms_.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const std::size_t first = 1 + i * inputs_per_map;
      const at::Tensor gradient = as_rows(gradients[i]);  // (N, out)
      pull_map(gradient, rows.stored(), saved[first], first, result, of_input);
      if (terms_[i].low.defined())
        pull_term(terms_[i], gradient, rows, {saved.data() + first + 2, 2}, first, result,
                  of_input);
    }
    if (wants(0)) {
      at::Tensor& sum = of_input.through_weights;
      if (of_input.through_terms.defined()) sum.add_(of_input.through_terms);
      result[0] = x.dim() == 2 ? sum : sum.view(x.sizes());
    }
    return result;
  }

  void pull_map(const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& weight,
                std::size_t first, Tensors& result, OfInput& of_input) const {
    if (wants(first)) result[first] = at::mm(transposed(gradient), rows);
    if (wants(first + 1)) result[first + 1] = gradient.sum(0);
    if (wants(0)) add_product(of_input.through_weights, gradient, weight);
  }

  void pull_term(const LowRank& term, const at::Tensor& gradient, Rows& rows,
                 std::span<const at::Tensor> factors, std::size_t first, Tensors& result,
                 OfInput& of_input) const {
    const at::Tensor &a = factors[0], &b = factors[1];
    if (!term.mask.defined() && is_split(gradient, a)) {
      return pull_split_term(term, gradient, rows.stored(), factors, first, result, of_input);
    }
    const at::Tensor wide = cast(gradient, a.scalar_type());  // (N, out)
    if (wants(first + 3))
      result[first + 3] = at::addmm(b, transposed(wide), term.low, /*beta=*/0, term.scale);
    if (!wants(first + 2) && !wants(0)) return;
    const at::Tensor of_low = at::addmm(term.low, wide, b, /*beta=*/0, term.scale);  // (N, rank)
    if (wants(first + 2))
      result[first + 2] =
          at::mm(transposed(of_low), dropped(term, rows.as(a.scalar_type())));  // (rank, in)
    if (!wants(0)) return;
    if (term.mask.defined()) {
      const at::Tensor through = dropped(term, at::mm(of_low, a));  // (N, in)
      at::Tensor& sum = of_input.through_terms;
      sum = sum.defined() ? sum.add(through) : through;
    } else {
      add_product(of_input.through_terms, of_low, a);
    }
  }

  /// The same without a mask, see split_products.hpp.
  void pull_split_term(const LowRank& term, const at::Tensor& gradient, const at::Tensor& x,
                       std::span<const at::Tensor> factors, std::size_t first, Tensors& result,
                       OfInput& of_input) const {
    const at::Tensor &a = factors[0], &b = factors[1];
    if (wants(first + 3)) {  // (out, rank)
      result[first + 3] =
          transposed(narrow_times_rows(term.low, gradient).mul_(term.scale)).contiguous();
    }
    if (!wants(first + 2) && !wants(0)) return;
    const at::Tensor of_low = times_factor(gradient, b).mul_(term.scale);    // (N, rank)
    if (wants(first + 2)) result[first + 2] = narrow_times_rows(of_low, x);  // (rank, in)
    if (wants(0)) add_times_factor(of_input.through_weights, of_low, a, /*scale=*/1);
  }

  /// A mask acts on x and on its gradient alike.
  [[nodiscard]] static at::Tensor dropped(const LowRank& term, const at::Tensor& x) {
    return term.mask.defined() ? at::native_dropout_backward(x, term.mask, term.kept_scale) : x;
  }

  static void add_product(at::Tensor& sum, const at::Tensor& left, const at::Tensor& right) {
    if (!sum.defined()) {
      sum = at::mm(left, right);
    } else if (sum.scalar_type() == left.scalar_type()) {
      sum.addmm_(left, right);
    } else {  // terms of several types
      sum = sum.add(at::mm(left, right));
    }
  }

  std::vector<LowRank> terms_;
};

/// @brief x·Wᵀ + b + term, for one map. The sum with the term is made in the wider type and rounded
/// once. @param rows  x as (N, in).
[[nodiscard]] inline at::Tensor map_rows(const LinearMap& map, Rows& rows, bool training,
                                         ProjectionNode::LowRank& left) {
  const at::Tensor& x = rows.stored();
  at::Tensor output = map.bias.defined() ? at::addmm(map.bias, x, transposed(map.weight))
                                         : at::mm(x, transposed(map.weight));  // (N, out)
  if (map.term == nullptr) return output;
  const bool drops = training && map.term->dropout > 0;
  if (!drops && is_split(x, map.term->a)) {
    left.scale = map.term->scale;
    left.low = times_factor(x, transposed(map.term->a));  // (N, rank)
    add_times_factor(output, left.low, transposed(map.term->b), left.scale);
    return output;
  }
  at::Tensor input = rows.as(map.term->a.scalar_type());
  left.scale = map.term->scale;
  if (drops) {
    std::tie(input, left.mask) = at::native_dropout(input, map.term->dropout, /*train=*/true);
    left.kept_scale = 1 / (1 - map.term->dropout);
  }
  left.low = at::mm(input, transposed(map.term->a));  // (N, rank)
  output.add_(at::mm(left.low, transposed(map.term->b)), left.scale);
  return output;
}

/// @brief Applies all maps to x, each operand in the type that it has. One node of the graph, where
/// one is wanted.
inline void apply_maps_as_typed(std::span<const LinearMap> maps, const at::Tensor& x, bool training,
                                std::span<at::Tensor> outputs) {
  std::vector<ProjectionNode::LowRank> terms(maps.size());
  {
    const PlainMath plain;
    Rows rows{x};
    std::vector<std::int64_t> sizes = x.sizes().vec();
    for (std::size_t i = 0; i < maps.size(); ++i) {
      outputs[i] = map_rows(maps[i], rows, training, terms[i]);
      sizes.back() = outputs[i].size(1);
      if (x.dim() != 2) outputs[i] = outputs[i].view(sizes);
    }
  }
  if (!c10::GradMode::is_enabled()) return;
  std::vector<at::Tensor> inputs{x};
  inputs.reserve(1 + 4 * maps.size());
  for (const LinearMap& map : maps) {
    inputs.insert(inputs.end(), {map.weight, map.bias});
    inputs.push_back(map.term != nullptr ? map.term->a : at::Tensor{});
    inputs.push_back(map.term != nullptr ? map.term->b : at::Tensor{});
  }
  if (!is_recorded(inputs)) return;
  const auto node = make_node<ProjectionNode>(inputs, std::move(terms));
  for (const at::Tensor& output : outputs) append_output(output, node);
}

/// @brief Applies all maps to x. Under autocast x, weights and biases are cast as LibTorch's own
/// linear map casts them, and terms compute in their own type.
/// @param outputs  receives (…, out) for each map.
inline void apply_maps(std::span<const LinearMap> maps, const at::Tensor& x, bool training,
                       std::span<at::Tensor> outputs) {
  const at::DeviceType device = x.device().type();
  if (!at::autocast::is_autocast_enabled(device))
    return apply_maps_as_typed(maps, x, training, outputs);
  const auto as_cast = [dtype = at::autocast::get_autocast_dtype(device)](const at::Tensor& one) {
    const bool casts = one.defined() && one.is_floating_point() && one.scalar_type() != at::kDouble;
    return casts ? one.to(dtype) : one;
  };
  std::vector<LinearMap> typed;
  typed.reserve(maps.size());
  for (const LinearMap& map : maps)
    typed.push_back({as_cast(map.weight), as_cast(map.bias), map.term});
  apply_maps_as_typed(typed, as_cast(x), training, outputs);
}

}  // namespace block_streamer::inline v1::detail
