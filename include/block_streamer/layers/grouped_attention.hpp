// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/version.h>

#include <cstdint>
#include <optional>

namespace block_streamer::inline v1::detail {

/// LibTorch's kernels for attention, numbered as at::SDPBackend, whose header is CUDA's.
enum class FusedAttention : std::int64_t { flash = 1, cudnn = 3 };

/// LibTorch before 2.5 knows no groups: there, heads are repeated.
constexpr bool knows_groups = TORCH_VERSION_MAJOR > 2 ||
                              (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5);

/// Each head of (B,Nk,S,D) once for every head that reads it: (B,Nq,S,D).
[[nodiscard]] inline at::Tensor repeated_heads(const at::Tensor& heads, const at::Tensor& q) {
  const std::int64_t group = q.size(1) / heads.size(1);
  return group == 1 ? heads : heads.repeat_interleave(group, 1);
}

/// @brief at::scaled_dot_product_attention without dropout. q: (B,Nq,T,D); k, v: (B,Nk,S,D).
template <bool native = knows_groups, class Tensor = at::Tensor>
[[nodiscard]] Tensor grouped_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                       const std::optional<at::Tensor>& mask, bool causal,
                                       double scale) {
  if constexpr (native) {
    return at::scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale,
                                            /*enable_gqa=*/q.size(1) > k.size(1));
  } else {
    return at::scaled_dot_product_attention(q, repeated_heads(k, q), repeated_heads(v, q), mask,
                                            0.0, causal, scale);
  }
}

/// @brief The kernel that LibTorch would take for causal attention of these, none of them a copy.
template <bool native = knows_groups, class Tensor = at::Tensor>
[[nodiscard]] FusedAttention causal_kernel(const Tensor& q, const Tensor& k, const Tensor& v) {
  if constexpr (native) {
    return FusedAttention{at::_fused_sdp_choice(q, k, v, std::nullopt, 0.0, true, std::nullopt,
                                                /*enable_gqa=*/q.size(1) > k.size(1))};
  } else {
    const auto like = [&](const Tensor& t) {
      return t.narrow(1, 0, 1).expand({t.size(0), q.size(1), t.size(2), t.size(3)});
    };
    return FusedAttention{at::_fused_sdp_choice(q, like(k), like(v), std::nullopt, 0.0, true)};
  }
}

}  // namespace block_streamer::inline v1::detail
