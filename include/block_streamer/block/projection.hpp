// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/projection_node.hpp>
#include <block_streamer/block/weights.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace block_streamer::inline v1 {

/// Which weights of its block a linear map is made of.
struct Linear {
  std::size_t weight = 0;           ///< (out, in)
  std::optional<std::size_t> bias;  ///< (out)
};

/// @brief The linear seam, for maps of one x: x·Wᵀ (+ b) of each, plus the adapters woven into
/// them. Blocks apply every linear map through it, so that adapters need no copy of a block. Maps
/// of one x are best applied in one call: they share casts and one node of the graph.
/// **Shapes.** x: (…, in); weights: (out, in); results: (…, out).
/// **Threads.** Like any operation on tensors.
template <std::size_t count>
[[nodiscard]] std::array<at::Tensor, count> project_all(const Weights& weights,
                                                        const std::array<Linear, count>& maps,
                                                        const at::Tensor& x) {
  std::array<detail::LinearMap, count> computed;
  for (std::size_t i = 0; i < count; ++i) {
    const ProjectionAdapter* adapter = weights.adapter(maps[i].weight);
    computed[i] = {weights[maps[i].weight], maps[i].bias ? weights[*maps[i].bias] : at::Tensor{},
                   adapter != nullptr ? adapter->low_rank() : nullptr};
  }
  std::array<at::Tensor, count> outputs;
  detail::apply_maps(computed, x, weights.training(), outputs);
  for (std::size_t i = 0; i < count; ++i) {
    const ProjectionAdapter* adapter = weights.adapter(maps[i].weight);
    if (adapter != nullptr && computed[i].term == nullptr)
      outputs[i] = adapter->add(x, std::move(outputs[i]), weights.training());
  }
  return outputs;
}

/// @brief One map alone. @see project_all
[[nodiscard]] inline at::Tensor project(const Weights& weights, const Linear& map,
                                        const at::Tensor& x) {
  return std::move(project_all<1>(weights, {map}, x)[0]);
}

/// @brief x·Wᵀ of the weight `index`. @see project_all
[[nodiscard]] inline at::Tensor project(const Weights& weights, std::size_t index,
                                        const at::Tensor& x) {
  return project(weights, Linear{index, {}}, x);
}

/// @brief The same with a bias, the weight `bias_index`: (out).
[[nodiscard]] inline at::Tensor project(const Weights& weights, std::size_t index,
                                        std::size_t bias_index, const at::Tensor& x) {
  return project(weights, Linear{index, bias_index}, x);
}

}  // namespace block_streamer::inline v1
