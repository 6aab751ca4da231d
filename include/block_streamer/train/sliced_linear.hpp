// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/train/sliced_matrix.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

[[nodiscard]] inline at::Tensor columns_of(const at::Tensor& matrix, const RowRange& rows) {
  return matrix.narrow(1, static_cast<std::int64_t>(rows.begin),
                       static_cast<std::int64_t>(rows.count));
}

/// x·Wᵀ: (N,C) to (N,R).
[[nodiscard]] inline at::Tensor multiply_slices(SlicedMatrix& matrix, const at::Tensor& x,
                                                bool backward_follows) {
  at::Tensor result;
  const bool whole = matrix.slices().size() == 1;
  if (!whole) result = at::empty({x.size(0), matrix.row_count()}, x.options());
  matrix.visit_forward(backward_follows, [&](const RowRange& rows, const at::Tensor& weight) {
    if (whole) {
      result = at::linear(x, weight);
    } else {
      columns_of(result, rows).copy_(at::linear(x, weight));
    }
  });
  return result;
}

/// g·W: (N,R) to (N,C). The parts of the sum are added in fp32 (fp64), from the last slice to the
/// first.
[[nodiscard]] inline at::Tensor multiply_transposed(SlicedMatrix& matrix,
                                                    const at::Tensor& gradient) {
  at::Tensor result;
  const bool whole = matrix.slices().size() == 1;
  const auto wide = gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  matrix.visit_backward([&](const RowRange& rows, const at::Tensor& weight) {
    at::Tensor part = at::mm(columns_of(gradient, rows), weight);
    if (whole) {
      result = std::move(part);
    } else if (!result.defined()) {
      result = part.to(wide);
    } else {
      result.add_(part);
    }
  });
  return result.to(gradient.scalar_type());
}

}  // namespace detail

/// @brief The backward of sliced_linear(): shows the matrix again. Keeps no tensor.
class SlicedLinearNode final : public torch::autograd::Node {
 public:
  SlicedLinearNode(std::shared_ptr<SlicedMatrix> matrix, at::IntArrayRef input_sizes,
                   torch::autograd::edge_list edges)
      : Node{std::move(edges)},
        matrix_{std::move(matrix)},
        input_sizes_{input_sizes.begin(), input_sizes.end()} {}

  [[nodiscard]] std::string name() const override { return "SlicedLinearBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& outputs) override {
    expects(!c10::GradMode::is_enabled(),
            "a sliced linear map has no second derivative (create_graph=true)");
    const at::Tensor& gradient = outputs.at(0);  // (…,R)
    if (!gradient.defined()) return {at::Tensor{}};
    const at::Tensor rows = gradient.reshape({-1, gradient.size(-1)});
    return {detail::multiply_transposed(*matrix_, rows).view(input_sizes_)};
  }

 private:
  std::shared_ptr<SlicedMatrix> matrix_;
  std::vector<std::int64_t> input_sizes_;
};

/// @brief x·Wᵀ with a frozen W (R, C) that is shown slice by slice, and again in a backward.
/// The bits depend on the slices, not on where the matrix lies.
/// **Shapes.** input: (…, C) in the type and on the device of W; result: (…, R).
/// @throws UnsupportedError under autocast: a backward would not cast alike; what the visit throws.
/// **Cost.** One visit of the matrix, one more in a backward; each slice's result is copied into
/// the whole unless there is only one.
[[nodiscard]] inline at::Tensor sliced_linear(const std::shared_ptr<SlicedMatrix>& matrix,
                                              const at::Tensor& input) {
  if (at::autocast::is_autocast_enabled(input.device().type())) {
    throw UnsupportedError{"a linear map whose weight is streamed is not supported under autocast"};
  }
  const bool differentiable = c10::GradMode::is_enabled() && input.requires_grad();
  std::vector<std::int64_t> sizes = input.sizes().vec();
  expects(!sizes.empty(), "the input of a linear map has a last dimension");
  sizes.back() = matrix->row_count();
  at::Tensor output;
  {
    const c10::NoGradGuard no_grad;
    const at::Tensor rows = input.detach().reshape({-1, input.size(-1)});  // (N,C)
    output = detail::multiply_slices(*matrix, rows, differentiable).view(sizes);
  }
  if (!differentiable) return output;
  output = output.detach();  // a view has no history of its own
  const std::shared_ptr<torch::autograd::Node> node{
      new SlicedLinearNode{matrix, input.sizes(), torch::autograd::collect_next_edges(input)},
      torch::autograd::deleteNode};
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace block_streamer::inline v1
