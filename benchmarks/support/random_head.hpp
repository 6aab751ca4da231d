// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/layers/rms_norm.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <cstdint>

namespace block_streamer_benchmarks {

/// @brief Final norm and head, or embedding, of random bf16 weights.
struct RandomHead {
  RandomHead(std::int64_t vocabulary, std::int64_t width, double norm_eps, at::Device device)
      : eps{norm_eps} {
    const auto half = at::TensorOptions{}.dtype(at::kBFloat16).device(device);
    weight = at::randn({vocabulary, width}, half).mul_(0.02);
    norm = at::ones({width}, half);
  }

  /// (…,C) → (…,V)
  [[nodiscard]] at::Tensor logits(const at::Tensor& hidden) const {
    return at::linear(block_streamer::rms_norm(hidden, norm, eps), weight);
  }

  at::Tensor weight;  ///< (V,C)
  at::Tensor norm;    ///< (C)
  double eps;
};

}  // namespace block_streamer_benchmarks
