// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/layers/grouped_attention.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace block_streamer::inline v1 {

/// Independent sequences that lie one after another in one row of tokens (sequence packing). Tokens
/// see only their own sequence.
struct PackedSequences {
  std::vector<std::int64_t> lengths;  ///< each at least 1; their sum is T. Empty: nothing is packed
  at::Tensor offsets;                 ///< (sequences + 1) i32 on the compute device: 0 … T
  std::int64_t longest = 0;

  /// @param lengths  each at least 1. @param device  where attention is computed.
  [[nodiscard]] static PackedSequences of(std::span<const std::int64_t> lengths,
                                          at::Device device) {
    PackedSequences packed{{lengths.begin(), lengths.end()}, {}, 0};
    std::vector<std::int32_t> offsets{0};
    for (const std::int64_t n : lengths) {
      offsets.push_back(offsets.back() + static_cast<std::int32_t>(n));
      packed.longest = std::max(packed.longest, n);
    }
    packed.offsets = at::tensor(offsets, at::kInt).to(device);
    return packed;
  }
};

namespace detail {

/// Flash attention takes sequences of all lengths in one kernel; cuDNN would plan for every length.
[[nodiscard]] inline bool has_flash_attention(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v) {
  if (!q.is_cuda()) return false;
  const FusedAttention kernel = causal_kernel(q, k, v);
  return kernel == FusedAttention::flash || kernel == FusedAttention::cudnn;
}

[[nodiscard]] inline at::Tensor attend_in_one_kernel(const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v,
                                                     const PackedSequences& packed, double scale) {
  const auto rows = [](const at::Tensor& t) { return t.squeeze(0).transpose(0, 1); };  // (T,N,D)
  const auto result = at::_flash_attention_forward(
      rows(q), rows(k), rows(v), packed.offsets, packed.offsets, packed.longest, packed.longest,
      /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false, scale);
  return std::get<0>(result).transpose(0, 1).unsqueeze(0);
}

[[nodiscard]] inline at::Tensor attend_one_by_one(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v,
                                                  const PackedSequences& packed, double scale) {
  const auto queries = q.split_with_sizes(packed.lengths, 2);  // (1,Nq,t,D) each
  const auto keys = k.split_with_sizes(packed.lengths, 2);
  const auto values = v.split_with_sizes(packed.lengths, 2);
  std::vector<at::Tensor> attended;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    attended.push_back(grouped_attention(queries[i], keys[i], values[i], std::nullopt,
                                         packed.lengths[i] > 1, scale));
  }
  return at::cat(attended, 2);
}

}  // namespace detail

/// @brief Causal attention within each of the packed sequences; no mask of T·T is made.
/// q: (1,Nq,T,D); k, v: (1,Nk,T,D), Nk divides Nq; result as q.
/// **Cost.** Σ t² over the sequences instead of T². On CUDA in bf16 or fp16 one kernel, else one
/// for each sequence, which gives the bits of that sequence alone.
[[nodiscard]] inline at::Tensor attend_packed(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v, const PackedSequences& packed,
                                              double scale) {
  return detail::has_flash_attention(q, k, v) ? detail::attend_in_one_kernel(q, k, v, packed, scale)
                                              : detail::attend_one_by_one(q, k, v, packed, scale);
}

}  // namespace block_streamer::inline v1
