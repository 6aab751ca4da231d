// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/config_fields.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1::detail {

/// Keys that read_model_config() reads or checks, and keys without influence on the mathematics of
/// inference and training. Sorted.
inline constexpr std::array<std::string_view, 46> common_config_keys{
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "id2label",
    "initializer_range",
    "intermediate_size",
    "is_encoder_decoder",
    "label2id",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "partial_rotary_factor",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "use_sliding_window",
    "vocab_size"};

/// A key of other families that changes the mathematics unless it has its neutral value.
struct ActiveKey {
  std::string_view key;
  double neutral;  ///< a number of this value, null and false are harmless
};
inline constexpr std::array active_config_keys{
    ActiveKey{"add_cross_attention", 0},
    ActiveKey{"alibi", 0},
    ActiveKey{"attention_chunk_size", 0},
    ActiveKey{"attention_dropout", 0},
    ActiveKey{"attention_multiplier", 1},
    ActiveKey{"attn_logit_softcapping", 0},
    ActiveKey{"attn_output_gate", 0},
    ActiveKey{"clip_qkv", 0},
    ActiveKey{"embedding_multiplier", 1},
    ActiveKey{"embd_pdrop", 0},
    ActiveKey{"final_logit_softcapping", 0},
    ActiveKey{"hidden_dropout", 0},
    ActiveKey{"is_encoder_decoder", 0},
    ActiveKey{"logit_scale", 1},
    ActiveKey{"logits_scaling", 1},
    ActiveKey{"n_routed_experts", 0},
    ActiveKey{"no_rope_layers", 0},
    ActiveKey{"num_experts", 0},
    ActiveKey{"num_local_experts", 0},
    ActiveKey{"partial_rotary_factor", 1},
    ActiveKey{"qk_norm", 0},
    ActiveKey{"quantization_config", 0},
    ActiveKey{"query_pre_attn_scalar", 0},
    ActiveKey{"resid_pdrop", 0},
    ActiveKey{"residual_multiplier", 1},
    ActiveKey{"use_qk_norm", 0},
};

[[nodiscard]] inline bool is_neutral(const nlohmann::json& value, double neutral) {
  if (value.is_null() || (value.is_boolean() && !value.get<bool>())) return true;
  if (value.is_array()) return value.empty();
  return value.is_number() && value.get<double>() == neutral;
}

/// @throws UnsupportedError naming a key whose value changes the mathematics.
inline void refuse_active_keys(const ConfigFields& config) {
  for (const ActiveKey& active : active_config_keys) {
    const nlohmann::json* value = config.find(active.key);
    if (value == nullptr || is_neutral(*value, active.neutral)) continue;
    if (active.key == "quantization_config" && value->is_object() &&
        value->contains("quant_method")) {
      const ConfigFields quantization{*value, config.path(), "quantization_config"};
      quantization.refuse_unsupported("quant_method", value->at("quant_method"));
    }
    config.refuse_unsupported(active.key, *value);
  }
  const nlohmann::json* act = config.find("hidden_act");
  if (act != nullptr && *act != "silu" && *act != "swish") {
    config.refuse_unsupported("hidden_act", *act);
  }
}

/// Attention windows count only where a layer uses one: layer_types decides if it is there, else
/// the window's own fields.
inline void refuse_sliding_window(const ConfigFields& config, std::uint64_t layer_count) {
  if (const nlohmann::json* types = config.find("layer_types")) {
    if (!types->is_array()) config.refuse("layer_types", "must be a list", types);
    for (std::size_t i = 0; i < types->size(); ++i) {
      if (types->at(i) != "full_attention") {
        config.refuse_unsupported("layer_types[" + std::to_string(i) + "]", types->at(i));
      }
    }
    return;
  }
  const nlohmann::json* window = config.find("sliding_window");
  if (window == nullptr || !config.boolean("use_sliding_window").value_or(true)) return;
  const auto first_layer = config.size("max_window_layers", 0);
  if (first_layer && *first_layer >= layer_count) return;
  config.refuse_unsupported("sliding_window", *window);
}

/// One warning for all keys that nobody here knows.
inline void warn_of_unknown_keys(const ConfigFields& config, std::vector<std::string>& warnings) {
  std::string unknown;
  std::size_t count = 0;
  for (const auto& [key, value] : config.object().items()) {
    const bool known =
        std::find(common_config_keys.begin(), common_config_keys.end(), key) !=
            common_config_keys.end() ||
        std::any_of(active_config_keys.begin(), active_config_keys.end(),
                    [&key = key](const ActiveKey& active) { return active.key == key; });
    if (known || value.is_null()) continue;
    if (++count <= 10) unknown += (count == 1 ? "" : ", ") + key.substr(0, 60);
  }
  if (count == 0) return;
  if (count > 10) unknown += " and " + std::to_string(count - 10) + " more";
  warnings.push_back(config.path() + ": ignored, of unknown meaning: " + unknown);
}

}  // namespace block_streamer::inline v1::detail
