// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/projection.hpp>
#include <block_streamer/block/weights.hpp>
#include <block_streamer/layers/grouped_attention.hpp>
#include <block_streamer/layers/heads.hpp>
#include <block_streamer/layers/kv_cache.hpp>
#include <block_streamer/layers/packed_attention.hpp>
#include <block_streamer/layers/rms_norm.hpp>
#include <block_streamer/layers/rotary.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

namespace block_streamer::inline v1 {

struct AttentionShape {
  std::int64_t heads = 0;     ///< Nq
  std::int64_t kv_heads = 0;  ///< Nk, divides Nq: head h reads key/value head ⌊h·Nk/Nq⌋
  std::int64_t head_dim = 0;  ///< D, need not be C/Nq
  double norm_epsilon = 0;    ///< of the norms over the head, where there are any
};

/// Which weights of its block an attention layer is made of.
struct AttentionWeights {
  Linear query;                           ///< (Nq·D, C)
  Linear key;                             ///< (Nk·D, C)
  Linear value;                           ///< (Nk·D, C)
  Linear output;                          ///< (C, Nq·D)
  std::optional<std::size_t> query_norm;  ///< (D), shared by all heads
  std::optional<std::size_t> key_norm;    ///< (D)
};

/// What some consecutive tokens need to know about the others. Built once per pass.
struct AttentionTokens {
  std::int64_t past = 0;     ///< tokens in the cache before these
  RotaryTable rotary;        ///< (B or 1, T, 1, D)
  at::Tensor mask;           ///< (B or 1, 1, T, past+T), true: is seen; undefined: see `causal`
  bool causal = false;       ///< without a mask: each token sees itself and those before it
  PackedSequences packed{};  ///< with lengths: B is 1, no mask, no cache; `causal` is not looked at
};

namespace detail {

/// The heads of a group as rows of one head. q: (B,Nq,1,D) to (B,Nk,Nq/Nk,D).
[[nodiscard]] inline at::Tensor rows_of_groups(const at::Tensor& q, std::int64_t kv_heads) {
  return q.reshape({q.size(0), kv_heads, q.size(1) / kv_heads, q.size(3)});
}

/// One token of each sequence, and everything before it. cuDNN, which LibTorch prefers on some
/// devices, plans anew for every length of the keys (some 40 ms of the host a token); flash
/// attention does not, and serves whatever cuDNN does.
[[nodiscard]] inline at::Tensor attend_to_all(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v, double scale) {
  const at::Tensor rows = rows_of_groups(q, k.size(1));
  if (FusedAttention{at::_fused_sdp_choice(rows, k, v)} != FusedAttention::cudnn) {
    return at::scaled_dot_product_attention(rows, k, v, std::nullopt, 0.0, false, scale)
        .reshape(q.sizes());
  }
  return std::get<0>(at::_scaled_dot_product_flash_attention(rows, k, v, 0.0, false, false, scale))
      .reshape(q.sizes());
}

}  // namespace detail

/// @brief softmax(q·kᵀ/√D)·v with grouped heads. q: (B,Nq,T,D); k, v: (B,Nk,S,D); result
/// (B,Nq,T,D). `causal` aligns at the top left, so it is only for S = T.
[[nodiscard]] inline at::Tensor attend(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const AttentionTokens& tokens) {
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  const std::int64_t group = q.size(1) / k.size(1);
  if (!tokens.packed.lengths.empty()) return attend_packed(q, k, v, tokens.packed, scale);
  if (q.is_cuda() && q.size(2) == 1 && !tokens.mask.defined() && !c10::GradMode::is_enabled()) {
    return detail::attend_to_all(q, k, v, scale);
  }
  if (!tokens.mask.defined() || group == 1) {
    return detail::grouped_attention(
        q, k, v, tokens.mask.defined() ? std::optional{tokens.mask} : std::nullopt, tokens.causal,
        scale);
  }
  if (q.size(2) == 1) {  // the heads of a group see the same keys: make them rows of one head
    const at::Tensor rows = detail::rows_of_groups(q, k.size(1));
    return at::scaled_dot_product_attention(rows, k, v, tokens.mask, 0.0, false, scale)
        .reshape(q.sizes());
  }
  if (q.is_cpu()) {
    return detail::grouped_attention(q, k, v, tokens.mask, false, scale);
  }
  // No fused CUDA kernel takes a mask and groups at once; repeated heads keep (T,S) off the memory.
  return at::scaled_dot_product_attention(q, detail::repeated_heads(k, q),
                                          detail::repeated_heads(v, q), tokens.mask, 0.0, false,
                                          scale);
}

/// @brief Self-attention: project, norm the heads where the model does, rotate, append to the
/// cache, attend, project back. x: (B·T,C), rows of the batch one after another; result alike:
/// linear maps on rows are one operation each.
/// @param cache  null: the tokens see only each other, `tokens.past` is 0.
[[nodiscard]] inline at::Tensor self_attention(const Weights& weights,
                                               const AttentionWeights& which,
                                               const AttentionShape& shape, const at::Tensor& x,
                                               std::int64_t batch, const AttentionTokens& tokens,
                                               KvCache* cache, std::size_t layer) {
  const auto normed = [&](const at::Tensor& rows, auto norm) {
    if (!norm) return rows;
    return rms_norm(rows.view({batch, -1, rows.size(1) / shape.head_dim, shape.head_dim}),
                    weights[*norm], shape.norm_epsilon);  // (B,T,N,D)
  };
  const auto [queries, keys, values] =
      project_all<3>(weights, {which.query, which.key, which.value}, x);  // (B·T,N·D) each
  const at::Tensor q =
      split_heads(normed(queries, which.query_norm), batch, shape.head_dim, &tokens.rotary);
  at::Tensor k = split_heads(normed(keys, which.key_norm), batch, shape.head_dim, &tokens.rotary);
  at::Tensor v = split_heads(values, batch, shape.head_dim, nullptr);  // (B,Nk,T,D)
  if (cache != nullptr) {
    KvCache::Prefix prefix = cache->append(layer, tokens.past, k, v);
    k = std::move(prefix.keys);    // (B,Nk,past+T,D)
    v = std::move(prefix.values);  // alike
  }
  const at::Tensor attended = attend(q, k, v, tokens);           // (B,Nq,T,D)
  return project(weights, which.output, merge_heads(attended));  // (B·T,C)
}

}  // namespace block_streamer::inline v1
