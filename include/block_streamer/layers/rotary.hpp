// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/where.h>

#include <cstdint>
#include <numbers>

namespace block_streamer::inline v1 {

/// @brief The frequencies of rotary embedding: θ^(−2i/R), i = 0 … R/2 − 1.
/// Computed on the CPU in float32, so they are the same bits on every device.
/// @param rotary_dim  R, even: how many channels of a head turn.
[[nodiscard]] inline at::Tensor rotary_frequencies(std::int64_t rotary_dim, double theta) {
  expects(rotary_dim > 0 && rotary_dim % 2 == 0, "the rotary dimension is even and positive");
  const at::Tensor exponent =
      at::arange(0, rotary_dim, 2, at::TensorOptions{}.dtype(at::kLong)).to(at::kFloat) /
      static_cast<double>(rotary_dim);
  return at::pow(theta, exponent).reciprocal();  // (R/2), f32
}

/// Llama 3's stretching of the low frequencies, as config.json states it.
struct Llama3Scaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position = 8192;
};

/// @brief Divides the low frequencies by the factor, keeps the high ones and blends in between.
/// frequencies: (R/2), f32; result alike.
[[nodiscard]] inline at::Tensor llama3_frequencies(const at::Tensor& frequencies,
                                                   const Llama3Scaling& scaling) {
  const double longest_kept = scaling.original_max_position / scaling.high_freq_factor;
  const double shortest_scaled = scaling.original_max_position / scaling.low_freq_factor;
  const at::Tensor wavelength = frequencies.reciprocal() * (2 * std::numbers::pi);
  const at::Tensor scaled =
      at::where(wavelength > shortest_scaled, frequencies / scaling.factor, frequencies);
  const at::Tensor smooth =
      (wavelength.reciprocal() * scaling.original_max_position - scaling.low_freq_factor) /
      (scaling.high_freq_factor - scaling.low_freq_factor);
  const at::Tensor blended = (smooth.neg() + 1) * scaled / scaling.factor + smooth * scaled;
  const at::Tensor between =
      (wavelength >= longest_kept).logical_and(wavelength <= shortest_scaled);
  return at::where(between, blended, scaled);
}

/// cos and sin of the angles of some tokens, ready to multiply heads: (B or 1, T, 1, R).
struct RotaryTable {
  at::Tensor cos;
  at::Tensor
      sin;  ///< the first half negated: what the channels of the other half are multiplied by
};

/// @brief The table for tokens at `positions`; angles, cos and sin in float32, then rounded to the
/// type that the heads have.
/// **Shapes.** positions: (B or 1, T), i64, any values; frequencies: (R/2), f32, same device.
[[nodiscard]] inline RotaryTable rotary_table(const at::Tensor& positions,
                                              const at::Tensor& frequencies, at::ScalarType dtype) {
  const at::Tensor half = positions.to(at::kFloat).unsqueeze(-1) * frequencies;  // (B,T,R/2)
  const at::Tensor angles = at::cat({half, half}, -1).unsqueeze(2);              // (B,T,1,R)
  const at::Tensor sin = half.sin().unsqueeze(2);                                // (B,T,1,R/2)
  return {angles.cos().to(dtype), at::cat({sin.neg(), sin}, -1).to(dtype)};
}

/// @brief Turns channel pairs (i, i + R/2) of every head: the half-split layout of Llama's and
/// Qwen's checkpoints. The arithmetic is in x's type. x: (B,T,H,R); result alike.
[[nodiscard]] inline at::Tensor rotate_half_split(const at::Tensor& x, const RotaryTable& table) {
  return (x * table.cos).addcmul_(at::roll(x, x.size(-1) / 2, -1), table.sin);
}

/// @brief Turns them back: the inverse of rotate_half_split, and its gradient.
[[nodiscard]] inline at::Tensor rotate_back_half_split(const at::Tensor& x,
                                                       const RotaryTable& table) {
  return (x * table.cos).addcmul_(at::roll(x, x.size(-1) / 2, -1), table.sin, /*value=*/-1);
}

}  // namespace block_streamer::inline v1
