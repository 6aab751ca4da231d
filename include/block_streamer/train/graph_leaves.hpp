// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <set>
#include <vector>

namespace block_streamer::inline v1::detail {

/// Leaves that a graph leads to, `except` left out, in a fixed order.
[[nodiscard]] inline std::vector<at::Tensor> leaves_behind(const at::Tensor& output,
                                                           const at::Tensor& except) {
  std::vector<at::Tensor> leaves;
  std::set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open{output.grad_fn().get()};
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      if (!leaf->variable.is_same(except)) leaves.push_back(leaf->variable);
    }
    for (const auto& edge : node->next_edges()) open.push_back(edge.function.get());
  }
  return leaves;
}

}  // namespace block_streamer::inline v1::detail
