// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/config_fields.hpp>
#include <block_streamer/checkpoint/config_keys.hpp>
#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/rope_config.hpp>
#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/error.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1 {

/// A decoder's configuration in one spelling, whatever the file's. Every size is at least 1 and at
/// most 2^31; head_count is a multiple of kv_head_count; head_dim is even.
struct ModelConfig {
  std::string path;  ///< config.json, for messages
  std::string model_type;
  std::uint64_t hidden_size = 0;
  std::uint64_t layer_count = 0;
  std::uint64_t head_count = 0;
  std::uint64_t kv_head_count = 0;
  std::uint64_t head_dim = 0;  ///< not hidden_size / head_count in general
  std::uint64_t intermediate_size = 0;
  std::uint64_t vocabulary_size = 0;
  double rms_norm_eps = 0.0;
  RopeConfig rope;
  bool tie_word_embeddings = false;
  bool tie_is_explicit = false;  ///< the file says so, either way
  bool attention_bias = false;
  bool mlp_bias = false;
  std::uint64_t max_position = 0;
  std::optional<DType> stored_dtype;   ///< as the file claims; the tensors' own types count
  std::vector<std::uint64_t> eos_ids;  ///< of generation_config.json, else of config.json
  std::optional<std::uint64_t> bos_id;
  std::optional<std::uint64_t> pad_id;
};

namespace detail {

inline constexpr std::array<std::string_view, 2> readable_model_types{"llama", "qwen3"};

/// @throws UnsupportedError naming a model_type that is not implemented: its other fields may not
/// mean what they mean here, so this comes first.
[[nodiscard]] inline std::string read_model_type(const ConfigFields& config) {
  const auto type = config.text("model_type");
  if (!type) config.refuse("model_type", "is missing");
  if (std::find(readable_model_types.begin(), readable_model_types.end(), *type) ==
      readable_model_types.end()) {
    throw UnsupportedError{config.path() + ": model_type '" + type->substr(0, 80) +
                           "' is not implemented (implemented: llama, qwen3)"};
  }
  return *type;
}

inline void read_heads(const ConfigFields& config, ModelConfig& model) {
  model.head_count = config.required_size("num_attention_heads");
  model.kv_head_count = config.size("num_key_value_heads").value_or(model.head_count);
  if (model.head_count % model.kv_head_count != 0) {
    config.refuse(
        "num_attention_heads",
        "must be a multiple of num_key_value_heads = " + std::to_string(model.kv_head_count),
        config.find("num_attention_heads"));
  }
  if (const auto head_dim = config.size("head_dim")) {
    model.head_dim = *head_dim;
  } else {
    if (model.hidden_size % model.head_count != 0) {
      config.refuse("head_dim", "is missing and hidden_size is no multiple of num_attention_heads");
    }
    model.head_dim = model.hidden_size / model.head_count;
  }
  if (model.head_dim % 2 != 0) {
    config.refuse("head_dim", "must be even, it is " + std::to_string(model.head_dim));
  }
}

/// The flag at top level counts first; composite models nest it.
inline void read_tie_flag(const ConfigFields& config, ModelConfig& model) {
  auto flag = config.boolean("tie_word_embeddings");
  const nlohmann::json* text = config.find("text_config");
  if (!flag && text != nullptr && text->is_object()) {
    flag = ConfigFields{*text, config.path(), "text_config"}.boolean("tie_word_embeddings");
  }
  model.tie_is_explicit = flag.has_value();
  model.tie_word_embeddings = flag.value_or(false);
}

[[nodiscard]] inline std::optional<DType> read_stored_dtype(const ConfigFields& config,
                                                            std::vector<std::string>& warnings) {
  auto name = config.text("dtype");
  if (!name) name = config.text("torch_dtype");
  if (!name) return std::nullopt;
  if (name->starts_with("torch.")) name->erase(0, 6);
  if (*name == "bfloat16") return DType::bf16;
  if (*name == "float16") return DType::f16;
  if (*name == "float32") return DType::f32;
  if (*name == "float64") return DType::f64;
  warnings.push_back(config.path() + ": dtype '" + name->substr(0, 40) + "' is not known, ignored");
  return std::nullopt;
}

/// One id or a list of them. Ids beyond the vocabulary can never be produced.
[[nodiscard]] inline std::vector<std::uint64_t> read_ids(const ConfigFields& config,
                                                         std::string_view key,
                                                         std::uint64_t vocabulary_size,
                                                         std::vector<std::string>& warnings) {
  std::vector<std::uint64_t> ids;
  const nlohmann::json* value = config.find(key);
  if (value == nullptr) return ids;
  const nlohmann::json list = value->is_array() ? *value : nlohmann::json::array({*value});
  if (list.size() > 1000) config.refuse(key, "has more than 1000 entries");
  for (const nlohmann::json& id : list) {
    if (id.is_number_integer() && !id.is_number_unsigned()) continue;  // -1: "none" in old files
    if (!id.is_number_unsigned()) config.refuse(key, "must be an id or a list of ids", value);
    if (id.get<std::uint64_t>() < vocabulary_size) {
      ids.push_back(id.get<std::uint64_t>());
    } else {
      warnings.push_back(config.path() + ": " + std::string{key} + " " + ConfigFields::shown(id) +
                         " is beyond the vocabulary, ignored");
    }
  }
  return ids;
}

inline void read_token_ids(const ConfigFields& config, const std::filesystem::path& folder,
                           ModelConfig& model, std::vector<std::string>& warnings) {
  const auto first = [&](std::string_view key) {
    const auto ids = read_ids(config, key, model.vocabulary_size, warnings);
    return ids.empty() ? std::nullopt : std::optional{ids.front()};
  };
  model.bos_id = first("bos_token_id");
  model.pad_id = first("pad_token_id");
  const std::filesystem::path path = folder / "generation_config.json";
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    const nlohmann::json document = read_json_file(path);
    model.eos_ids =
        read_ids({document, path.string()}, "eos_token_id", model.vocabulary_size, warnings);
  }
  if (model.eos_ids.empty()) {
    model.eos_ids = read_ids(config, "eos_token_id", model.vocabulary_size, warnings);
  }
}

/// A model saved for another task has no language model head, or another one.
inline void warn_of_architecture(const ConfigFields& config, std::vector<std::string>& warnings) {
  const nlohmann::json* names = config.find("architectures");
  if (names == nullptr || !names->is_array() || names->empty()) return;
  const bool causal = std::any_of(names->begin(), names->end(), [](const nlohmann::json& name) {
    return name == "LlamaForCausalLM" || name == "Qwen3ForCausalLM";
  });
  if (!causal) {
    warnings.push_back(config.path() + ": architectures = " + ConfigFields::shown(*names) +
                       ", read as a causal language model");
  }
}

}  // namespace detail

/// @brief Reads config.json and generation_config.json of a model folder (or of the folder that a
/// .safetensors file lies in) into one spelling. Old and new names are accepted: `rope_theta` with
/// `rope_scaling` or `rope_parameters`, `torch_dtype` or `dtype`; a missing `head_dim` is hidden
/// size / heads, a missing `num_key_value_heads` the number of heads.
/// @param warnings  receives one line for each thing that is odd but harmless.
/// @throws StorageError if config.json cannot be read.
/// @throws FormatError naming a field that is missing, of the wrong type or out of range.
/// @throws UnsupportedError naming a model_type, rope type or active field that is not implemented.
[[nodiscard]] inline ModelConfig read_model_config(const std::filesystem::path& folder,
                                                   std::vector<std::string>& warnings) {
  std::error_code ignored;
  const std::filesystem::path parent =
      std::filesystem::is_directory(folder, ignored) ? folder : folder.parent_path();
  const std::filesystem::path path = parent / "config.json";
  const nlohmann::json document = read_json_file(path);
  const detail::ConfigFields config{document, path.string()};
  ModelConfig model;
  model.path = path.string();
  model.model_type = detail::read_model_type(config);
  detail::refuse_active_keys(config);
  model.hidden_size = config.required_size("hidden_size");
  model.layer_count = config.required_size("num_hidden_layers");
  model.intermediate_size = config.required_size("intermediate_size");
  model.vocabulary_size = config.required_size("vocab_size");
  model.max_position = config.required_size("max_position_embeddings");
  model.rms_norm_eps = config.required_positive("rms_norm_eps");
  detail::read_heads(config, model);
  detail::refuse_sliding_window(config, model.layer_count);
  model.rope = read_rope_config(config, warnings);
  detail::read_tie_flag(config, model);
  model.attention_bias = config.boolean("attention_bias").value_or(false);
  model.mlp_bias = config.boolean("mlp_bias").value_or(false);
  if (model.mlp_bias && model.model_type != "llama") {
    config.refuse_unsupported("mlp_bias", *config.find("mlp_bias"));
  }
  model.stored_dtype = detail::read_stored_dtype(config, warnings);
  detail::read_token_ids(config, parent, model, warnings);
  detail::warn_of_architecture(config, warnings);
  detail::warn_of_unknown_keys(config, warnings);
  return model;
}

}  // namespace block_streamer::inline v1
