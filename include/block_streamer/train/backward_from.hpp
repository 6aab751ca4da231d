// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>

#include <torch/csrc/autograd/autograd.h>

#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One backward from several outputs whose gradients are known, as where a loss was pulled
/// back apart from what it is of. Outputs of one node are one pass through it.
/// @param gradients  one per output, shaped as it.
inline void backward_from(std::span<const at::Tensor> outputs,
                          std::span<const at::Tensor> gradients) {
  expects(outputs.size() == gradients.size(), "every output has its gradient");
  torch::autograd::backward({outputs.begin(), outputs.end()}, {gradients.begin(), gradients.end()});
}

}  // namespace block_streamer::inline v1
