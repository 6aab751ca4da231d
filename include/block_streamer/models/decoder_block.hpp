// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/weights.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/layers/attention.hpp>
#include <block_streamer/layers/rms_norm.hpp>
#include <block_streamer/layers/swiglu.hpp>
#include <block_streamer/models/decoder_context.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::models {

/// @brief One pre-norm decoder layer: a = x + Attn(norm(x)), y = a + Mlp(norm(a)).
/// Serves the families whose layers differ only in which tensors there are: Llama (biases as the
/// configuration says) and Qwen3 (norms over the head before the rotation).
/// **Shapes.** hidden: (B,T,C) in the type of the weights.
class DecoderBlock {
 public:
  using Hidden = at::Tensor;
  using Context = DecoderContext;

  /// @param layer  its index in the model: which part of the KV cache is its own.
  DecoderBlock(const ModelConfig& config, std::size_t layer)
      : layer_{layer},
        epsilon_{config.rms_norm_eps},
        shape_{static_cast<std::int64_t>(config.head_count),
               static_cast<std::int64_t>(config.kv_head_count),
               static_cast<std::int64_t>(config.head_dim), config.rms_norm_eps} {
    for (ExpectedTensor& tensor : decoder_block_tensors(config)) {
      const bool matrix = tensor.shape.size() == 2;
      specs_.push_back({std::move(tensor.name), std::move(tensor.shape), /*projection=*/matrix});
    }
    input_norm_ = index("input_layernorm.weight");
    mlp_norm_ = index("post_attention_layernorm.weight");
    attention_ = {linear("self_attn.q_proj"),      linear("self_attn.k_proj"),
                  linear("self_attn.v_proj"),      linear("self_attn.o_proj"),
                  find("self_attn.q_norm.weight"), find("self_attn.k_norm.weight")};
    mlp_ = {linear("mlp.gate_proj"), linear("mlp.up_proj"), linear("mlp.down_proj")};
  }

  [[nodiscard]] std::vector<WeightSpec> weight_specs() const { return specs_; }

  [[nodiscard]] at::Tensor forward(const Weights& weights, const at::Tensor& hidden,
                                   DecoderContext& context) const {
    if (context.chunks.size() == 1) {
      return chunk(weights, hidden, context.chunks.front(), context.cache);
    }
    std::vector<at::Tensor> outputs;
    outputs.reserve(context.chunks.size());
    for (const TokenChunk& tokens : context.chunks) {
      outputs.push_back(
          chunk(weights, hidden.narrow(1, tokens.begin, tokens.count), tokens, context.cache));
    }
    return at::cat(outputs, 1);  // (B,T,C)
  }

 private:
  [[nodiscard]] at::Tensor chunk(const Weights& weights, const at::Tensor& x,
                                 const TokenChunk& tokens, KvCache* cache) const {
    const at::Tensor rows = x.reshape({-1, x.size(-1)});  // (B·T,C)
    const at::Tensor attended =
        rows + self_attention(weights, attention_, shape_,
                              rms_norm(rows, weights[input_norm_], epsilon_), x.size(0),
                              tokens.attention, cache, layer_);
    const at::Tensor output =
        attended + swiglu(weights, mlp_, rms_norm(attended, weights[mlp_norm_], epsilon_));
    return output.view(x.sizes());
  }

  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const {
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (specs_[i].name == name) return i;
    }
    return std::nullopt;
  }
  [[nodiscard]] std::size_t index(std::string_view name) const {
    const auto found = find(name);
    expects(found.has_value(), "a decoder layer has the weight " + std::string{name});
    return *found;
  }
  [[nodiscard]] Linear linear(const std::string& name) const {
    return {index(name + ".weight"), find(name + ".bias")};
  }

  std::size_t layer_;
  double epsilon_;
  AttentionShape shape_;
  std::vector<WeightSpec> specs_;
  std::size_t input_norm_ = 0;
  std::size_t mlp_norm_ = 0;
  AttentionWeights attention_;
  SwigluWeights mlp_;
};

static_assert(streamable_block<DecoderBlock>);

}  // namespace block_streamer::inline v1::models
