// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/architecture/registry.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/tensor_spec.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// A tensor that a model needs: its name relative to its block, or in full, and its shape.
struct ExpectedTensor {
  std::string name;
  Shape shape;
};

/// @brief The tensors of one decoder block, in the order in which blocks use them. The same for
/// every block of the model. Linear weights are [out, in]; biases as the configuration says.
[[nodiscard]] inline std::vector<ExpectedTensor> decoder_block_tensors(const ModelConfig& config) {
  const std::uint64_t hidden = config.hidden_size;
  const std::uint64_t inner = config.intermediate_size;
  const std::uint64_t query = config.head_count * config.head_dim;
  const std::uint64_t key = config.kv_head_count * config.head_dim;
  std::vector<ExpectedTensor> tensors;
  const auto linear = [&tensors](const std::string& name, std::uint64_t out, std::uint64_t in,
                                 bool bias) {
    tensors.push_back({name + ".weight", {out, in}});
    if (bias) tensors.push_back({name + ".bias", {out}});
  };
  tensors.push_back({"input_layernorm.weight", {hidden}});
  linear("self_attn.q_proj", query, hidden, config.attention_bias);
  linear("self_attn.k_proj", key, hidden, config.attention_bias);
  linear("self_attn.v_proj", key, hidden, config.attention_bias);
  linear("self_attn.o_proj", hidden, query, config.attention_bias);
  if (family_of(config.model_type) == ModelFamily::qwen3) {
    tensors.push_back({"self_attn.q_norm.weight", {config.head_dim}});
    tensors.push_back({"self_attn.k_norm.weight", {config.head_dim}});
  }
  tensors.push_back({"post_attention_layernorm.weight", {hidden}});
  linear("mlp.gate_proj", inner, hidden, config.mlp_bias);
  linear("mlp.up_proj", inner, hidden, config.mlp_bias);
  linear("mlp.down_proj", hidden, inner, config.mlp_bias);
  return tensors;
}

inline constexpr std::string_view decoder_layers_prefix = "model.layers.";
inline constexpr std::string_view embedding_name = "model.embed_tokens.weight";
inline constexpr std::string_view final_norm_name = "model.norm.weight";
inline constexpr std::string_view head_name = "lm_head.weight";

/// @brief "model.layers.7."
[[nodiscard]] inline std::string decoder_block_prefix(std::uint64_t layer) {
  return std::string{decoder_layers_prefix} + std::to_string(layer) + ".";
}

}  // namespace block_streamer::inline v1
