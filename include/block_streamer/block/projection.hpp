// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/weights.hpp>

#include <ATen/ops/linear.h>

namespace block_streamer::inline v1 {

/// @brief The linear seam: x·Wᵀ of the weight `index`, plus the adapter woven into it, if any.
/// Blocks apply every linear map through this function, so that adapters need no copy of a block.
/// **Shapes.** x: (…, in); weight: (out, in); result: (…, out).
[[nodiscard]] inline at::Tensor project(const Weights& weights, std::size_t index,
                                        const at::Tensor& x) {
  at::Tensor output = at::linear(x, weights[index]);  // (…, out)
  if (const ProjectionAdapter* adapter = weights.adapter(index))
    return adapter->add(x, std::move(output), weights.training());
  return output;
}

/// @brief The same with a bias, the weight `bias_index`: (out).
[[nodiscard]] inline at::Tensor project(const Weights& weights, std::size_t index,
                                        std::size_t bias_index, const at::Tensor& x) {
  at::Tensor output = at::linear(x, weights[index], weights[bias_index]);  // (…, out)
  if (const ProjectionAdapter* adapter = weights.adapter(index))
    return adapter->add(x, std::move(output), weights.training());
  return output;
}

}  // namespace block_streamer::inline v1
