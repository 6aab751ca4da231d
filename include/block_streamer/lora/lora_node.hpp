// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <string>
#include <utility>

namespace block_streamer::inline v1::detail {

/// x as rows (N, in), in the adapter's dtype.
[[nodiscard]] inline at::Tensor rows_of(const at::Tensor& x, at::ScalarType dtype) {
  return x.reshape({-1, x.size(-1)}).to(dtype);
}

/// @brief Backward of y = output + s·(x·Aᵀ)·Bᵀ as one node with its six products and casts written
/// out. With the same sums as the chain of single operations, it spares their bookkeeping, which
/// costs more than the products of a low rank. Inputs in order: x, output, A, B.
class LoraNode final : public torch::autograd::Node {
 public:
  LoraNode(torch::autograd::edge_list edges, const at::Tensor& x, const at::Tensor& a,
           const at::Tensor& b, at::Tensor low, double scale, bool low_is_scaled)
      : Node{std::move(edges)},
        x_{x, false},
        a_{a, false},
        b_{b, false},
        low_{std::move(low)},
        scale_{scale},
        low_is_scaled_{low_is_scaled} {}

  [[nodiscard]] std::string name() const override { return "LoraBackward"; }
  void release_variables() override {
    x_.reset_data();
    a_.reset_data();
    b_.reset_data();
    low_.reset();
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& outputs) override {
    expects(!c10::GradMode::is_enabled(),
            "an adapter has no second derivative (create_graph=true)");
    const at::Tensor& gradient = outputs.at(0);  // (…, out)
    torch::autograd::variable_list result(4);
    if (!gradient.defined()) return result;
    const at::Tensor x = x_.unpack(), a = a_.unpack(), b = b_.unpack();
    const at::Tensor rows = rows_of(gradient, a.scalar_type());  // (N, out)
    if (task_should_compute_output(1)) result[1] = gradient;
    if (task_should_compute_output(3)) {
      result[3] = at::mm(rows.t(), low_);  // (out, rank)
      if (!low_is_scaled_) result[3].mul_(scale_);
    }
    if (!task_should_compute_output(0) && !task_should_compute_output(2)) return result;
    const at::Tensor low_gradient = at::mm(rows, b).mul_(scale_);  // (N, rank)
    if (task_should_compute_output(2))
      result[2] = at::mm(low_gradient.t(), rows_of(x, a.scalar_type()));
    if (task_should_compute_output(0)) {
      result[0] = at::mm(low_gradient, a).to(x.scalar_type()).view(x.sizes());
    }
    return result;
  }

 private:
  torch::autograd::SavedVariable x_, a_, b_;
  at::Tensor low_;  ///< x·Aᵀ (N, rank), times the scale if low_is_scaled_
  double scale_;
  bool low_is_scaled_;
};

/// @brief output + scale·(x·Aᵀ)·Bᵀ in the factors' dtype, rounded to output's. Records one node
/// where a gradient is wanted. A scale that is a power of two is applied to the low-rank side,
/// where it is as exact and costs less.
[[nodiscard]] inline at::Tensor add_low_rank(const at::Tensor& x, const at::Tensor& output,
                                             const at::Tensor& a, const at::Tensor& b, double scale,
                                             bool exact_scale) {
  const bool wanted = c10::GradMode::is_enabled() && (x.requires_grad() || output.requires_grad() ||
                                                      a.requires_grad() || b.requires_grad());
  at::Tensor low, result;
  {
    const c10::NoGradGuard no_grad;
    low = at::mm(rows_of(x, a.scalar_type()), a.t());  // (N, rank)
    if (exact_scale) low.mul_(scale);
    at::Tensor delta = at::mm(low, b.t());  // (N, out)
    if (!exact_scale) delta.mul_(scale);
    result = at::empty_like(output);
    at::add_out(result, output, delta.view(output.sizes()));
  }
  if (!wanted) return result;
  const std::shared_ptr<torch::autograd::Node> node{
      new LoraNode{torch::autograd::collect_next_edges(x, output, a, b), x, a, b, std::move(low),
                   scale, exact_scale},
      torch::autograd::deleteNode};
  torch::autograd::set_history(result, node);
  return result;
}

}  // namespace block_streamer::inline v1::detail
