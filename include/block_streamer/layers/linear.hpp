// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/projection.hpp>
#include <block_streamer/block/weights.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

namespace block_streamer::inline v1 {

/// Which weights of its block a linear map is made of.
struct Linear {
  std::size_t weight = 0;           ///< (out, in)
  std::optional<std::size_t> bias;  ///< (out)
};

/// @brief x·Wᵀ (+ b), through the seam where adapters are woven in. x: (…, in); result: (…, out).
[[nodiscard]] inline at::Tensor apply(const Weights& weights, const Linear& linear,
                                      const at::Tensor& x) {
  return linear.bias ? project(weights, linear.weight, *linear.bias, x)
                     : project(weights, linear.weight, x);
}

}  // namespace block_streamer::inline v1
