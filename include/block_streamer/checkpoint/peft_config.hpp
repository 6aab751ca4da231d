// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/core/error.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

/// What an `adapter_config.json` of PEFT says about a LoRA adapter, as far as it is implemented.
struct PeftConfig {
  std::string base_model;
  std::uint64_t rank = 8;
  double alpha = 8;
  double dropout = 0;
  bool use_rslora = false;
  std::vector<std::string> target_modules;    ///< names or suffixes; or
  std::optional<std::string> target_pattern;  ///< a regular expression over whole names
  std::vector<std::string> exclude_modules;
  std::optional<std::string> exclude_pattern;
  std::optional<std::vector<std::uint64_t>> layers_to_transform;
  std::vector<std::string> layers_pattern;  ///< what stands before the layer number: "layers"
  /// Regular expressions over the end of a name, in file order: the first that matches counts.
  std::vector<std::pair<std::string, std::uint64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
};

namespace detail {
using PeftJson = nlohmann::ordered_json;  // patterns are tried in file order

/// One file's fields, each checked for its type.
class PeftFields {
 public:
  PeftFields(const PeftJson& json, const std::string& path) : json_{json}, path_{path} {}

  [[noreturn]] void refuse(const std::string& key, const std::string& why) const {
    throw UnsupportedError{path_ + ": \"" + key + "\" " + why};
  }
  /// nullptr if absent or null.
  [[nodiscard]] const PeftJson* find(const std::string& key) const {
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  [[nodiscard]] double number(const std::string& key, double otherwise) const {
    const PeftJson* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_number()) throw FormatError{path_, "\"" + key + "\" must be a number"};
    return value->get<double>();
  }
  [[nodiscard]] bool flag(const std::string& key) const {
    const PeftJson* value = find(key);
    if (value == nullptr) return false;
    if (!value->is_boolean()) throw FormatError{path_, "\"" + key + "\" must be true or false"};
    return value->get<bool>();
  }
  [[nodiscard]] std::uint64_t count(const std::string& key, const PeftJson& value) const {
    if (!value.is_number_integer() || value < 0 || value > 1'000'000'000)
      throw FormatError{path_, "\"" + key + "\" must hold whole numbers from 0"};
    return value.get<std::uint64_t>();
  }
  /// A string, or a list of strings.
  [[nodiscard]] std::vector<std::string> strings(const std::string& key) const {
    const PeftJson* value = find(key);
    if (value == nullptr) return {};
    if (value->is_string()) return {value->get<std::string>()};
    std::vector<std::string> list;
    for (const PeftJson& entry : *value) {
      if (!value->is_array() || !entry.is_string())
        throw FormatError{path_, "\"" + key + "\" must be a string or a list of strings"};
      list.push_back(entry.get<std::string>());
    }
    return list;
  }
  [[nodiscard]] bool is_string(const std::string& key) const {
    const PeftJson* value = find(key);
    return value != nullptr && value->is_string();
  }

  /// Fields that change nothing here whatever they say.
  [[nodiscard]] static bool harmless(std::string_view key) {
    static constexpr std::array names{"auto_mapping",  "base_model_name_or_path",
                                      "revision",      "inference_mode",
                                      "peft_version",  "loftq_config",
                                      "eva_config",    "corda_config",
                                      "megatron_core", "qalora_group_size",
                                      "task_type",     "lora_ga_config",
                                      "runtime_config"};
    for (const char* name : names) {
      if (key == name) return true;
    }
    return false;
  }
  [[nodiscard]] static bool implemented(std::string_view key) {
    static constexpr std::array names{"peft_type",           "r",
                                      "lora_alpha",          "lora_dropout",
                                      "use_rslora",          "bias",
                                      "init_lora_weights",   "target_modules",
                                      "exclude_modules",     "rank_pattern",
                                      "layers_to_transform", "layers_pattern",
                                      "alpha_pattern"};
    for (const char* name : names) {
      if (key == name) return true;
    }
    return false;
  }
  /// Every other field must be switched off: null, false, zero or empty.
  void refuse_active_strangers() const {
    for (const auto& [key, value] : json_.items()) {
      if (harmless(key) || implemented(key) || value.is_null() || value == false || value == 0)
        continue;
      if ((value.is_array() || value.is_object()) && value.empty()) continue;
      refuse(key, "is not implemented, and this adapter uses it");
    }
  }

 private:
  const PeftJson& json_;
  const std::string& path_;
};

inline void check_peft_kind(const PeftFields& fields) {
  const auto text = [&](const std::string& key) {
    const std::vector<std::string> values = fields.strings(key);
    return values.size() == 1 ? values[0] : std::string{};
  };
  if (text("peft_type") != "LORA") fields.refuse("peft_type", "is not LORA");
  if (const std::string task = text("task_type"); !task.empty() && task != "CAUSAL_LM")
    fields.refuse("task_type", "is " + task + "; only CAUSAL_LM is implemented");
  if (const std::string bias = text("bias"); !bias.empty() && bias != "none")
    fields.refuse("bias", "is \"" + bias + "\"; only \"none\" is implemented");
  // These change the base weights as well, so the adapter alone is not the model.
  const std::string init = fields.is_string("init_lora_weights") ? text("init_lora_weights") : "";
  if (!init.empty() && init != "gaussian" && init != "eva" && init != "orthogonal")
    fields.refuse("init_lora_weights",
                  "is \"" + init + "\", which changes the base model; convert the adapter first");
  fields.refuse_active_strangers();
}

inline void read_peft_layers(const PeftFields& fields, PeftConfig& config) {
  config.layers_pattern = fields.strings("layers_pattern");
  const PeftJson* layers = fields.find("layers_to_transform");
  if (layers == nullptr || (layers->is_array() && layers->empty())) return;
  config.layers_to_transform.emplace();
  if (!layers->is_array()) {
    config.layers_to_transform->push_back(fields.count("layers_to_transform", *layers));
    return;
  }
  for (const PeftJson& layer : *layers)
    config.layers_to_transform->push_back(fields.count("layers_to_transform", layer));
}

inline void read_peft_patterns(const PeftFields& fields, const std::string& path,
                               PeftConfig& config) {
  for (const char* key : {"rank_pattern", "alpha_pattern"}) {
    const PeftJson* patterns = fields.find(key);
    if (patterns == nullptr) continue;
    if (!patterns->is_object())
      throw FormatError{path, std::string{"\""} + key + "\" must be an object"};
    for (const auto& [pattern, value] : patterns->items()) {
      if (key[0] == 'r')
        config.rank_pattern.emplace_back(pattern, fields.count(key, value));
      else if (value.is_number())
        config.alpha_pattern.emplace_back(pattern, value.get<double>());
      else
        throw FormatError{path, "\"alpha_pattern\" must hold numbers"};
    }
  }
}
}  // namespace detail

/// @brief Reads the text of an adapter_config.json.
/// @param path  for messages.
/// @throws FormatError if it is not JSON or a field has the wrong type.
/// @throws UnsupportedError naming the field if the adapter uses what is not implemented (DoRA,
/// biases, modules_to_save, …); unknown fields are refused unless they are off.
[[nodiscard]] inline PeftConfig parse_peft_config(const std::string& path, std::string_view text) {
  if (!parse_json(text, path).is_object()) throw FormatError{path, "not a JSON object"};
  const detail::PeftJson json = detail::PeftJson::parse(text.begin(), text.end());
  const detail::PeftFields fields{json, path};
  detail::check_peft_kind(fields);
  PeftConfig config;
  if (const detail::PeftJson* rank = fields.find("r")) config.rank = fields.count("r", *rank);
  config.alpha = fields.number("lora_alpha", 8);
  config.dropout = fields.number("lora_dropout", 0);
  config.use_rslora = fields.flag("use_rslora");
  for (const bool exclude : {false, true}) {
    const std::string key = exclude ? "exclude_modules" : "target_modules";
    std::vector<std::string> names = fields.strings(key);
    const bool pattern = fields.is_string(key) && names[0] != "all-linear";
    auto& to_pattern = exclude ? config.exclude_pattern : config.target_pattern;
    auto& to_names = exclude ? config.exclude_modules : config.target_modules;
    if (pattern) to_pattern = std::move(names[0]);
    if (!pattern) to_names = std::move(names);
  }
  if (config.target_modules.empty() && !config.target_pattern)
    throw FormatError{path, "\"target_modules\" names nothing"};
  if (fields.find("base_model_name_or_path") != nullptr &&
      fields.is_string("base_model_name_or_path"))
    config.base_model = fields.strings("base_model_name_or_path")[0];
  detail::read_peft_layers(fields, config);
  detail::read_peft_patterns(fields, path, config);
  return config;
}

/// @brief The text of an adapter_config.json that PEFT loads; the same config gives the same bytes.
[[nodiscard]] inline std::string format_peft_config(const PeftConfig& config) {
  const auto number = [](double value) {
    const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
    return whole ? detail::PeftJson(static_cast<std::int64_t>(value)) : detail::PeftJson(value);
  };
  const auto or_null = [](const std::string& text) {
    return text.empty() ? detail::PeftJson() : detail::PeftJson(text);
  };
  detail::PeftJson rank_pattern = detail::PeftJson::object();
  for (const auto& [pattern, rank] : config.rank_pattern) rank_pattern[pattern] = rank;
  detail::PeftJson alpha_pattern = detail::PeftJson::object();
  for (const auto& [pattern, alpha] : config.alpha_pattern) alpha_pattern[pattern] = number(alpha);
  detail::PeftJson json{{"peft_type", "LORA"},
                        {"task_type", "CAUSAL_LM"},
                        {"base_model_name_or_path", or_null(config.base_model)},
                        {"r", config.rank},
                        {"lora_alpha", number(config.alpha)},
                        {"lora_dropout", config.dropout},
                        {"use_rslora", config.use_rslora},
                        {"target_modules", config.target_modules},
                        {"layers_to_transform", nullptr},
                        {"layers_pattern", nullptr},
                        {"rank_pattern", rank_pattern},
                        {"alpha_pattern", alpha_pattern},
                        {"bias", "none"},
                        {"fan_in_fan_out", false},
                        {"inference_mode", true},
                        {"init_lora_weights", true},
                        {"modules_to_save", nullptr},
                        {"use_dora", false}};
  if (config.target_pattern) json["target_modules"] = *config.target_pattern;
  if (config.layers_to_transform) json["layers_to_transform"] = *config.layers_to_transform;
  if (!config.layers_pattern.empty()) json["layers_pattern"] = config.layers_pattern;
  // A folder's name need not be UTF-8.
  return json.dump(2, ' ', false, detail::PeftJson::error_handler_t::replace) + "\n";
}

}  // namespace block_streamer::inline v1
