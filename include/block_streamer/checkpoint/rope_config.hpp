// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/config_fields.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// Rotary position embedding of a decoder.
struct RopeConfig {
  std::string type = "default";  ///< "default" or "llama3"
  double theta = 10000.0;
  double factor = 1.0;  ///< this and below: of llama3 only
  double low_freq_factor = 1.0;
  double high_freq_factor = 1.0;
  std::uint64_t original_max_position = 0;
  friend bool operator==(const RopeConfig&, const RopeConfig&) = default;
};

namespace detail {

/// The object that counts: rope_scaling (old spelling) before rope_parameters (new one); of one
/// nested by layer type, the entry of full attention. nullptr: neither is there.
[[nodiscard]] inline const nlohmann::json* rope_object(const ConfigFields& config,
                                                       std::string& name) {
  const nlohmann::json* object = nullptr;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const nlohmann::json* found = config.find(key);
    if (found == nullptr || found->empty() || object != nullptr) continue;
    if (!found->is_object()) config.refuse(key, "must be an object", found);
    object = found;
    name = key;
  }
  if (object != nullptr && object->contains("full_attention")) {
    name += ".full_attention";
    return &object->at("full_attention");
  }
  return object;
}

/// Keys that no rope type implemented here knows would change the rotation unseen.
inline void refuse_unknown_rope_keys(const ConfigFields& rope) {
  static constexpr std::array<std::string_view, 7> known{"rope_type",
                                                         "type",
                                                         "rope_theta",
                                                         "factor",
                                                         "low_freq_factor",
                                                         "high_freq_factor",
                                                         "original_max_position_embeddings"};
  for (const auto& [key, value] : rope.object().items()) {
    if (value.is_null() || std::find(known.begin(), known.end(), key) != known.end()) continue;
    if (key == "partial_rotary_factor" && value == 1) continue;
    rope.refuse_unsupported(key, value);
  }
}

inline void read_llama3(const ConfigFields& config, const ConfigFields& rope, RopeConfig& result) {
  result.factor = rope.required_positive("factor");
  result.low_freq_factor = rope.required_positive("low_freq_factor");
  result.high_freq_factor = rope.required_positive("high_freq_factor");
  constexpr const char* original = "original_max_position_embeddings";
  const auto inner = rope.size(original);
  result.original_max_position = inner ? *inner : config.required_size(original);
  if (result.high_freq_factor <= result.low_freq_factor) {
    rope.refuse("high_freq_factor", "must be above low_freq_factor", rope.find("high_freq_factor"));
  }
}

/// The base: the object's own, else the top level's, else the default with a warning: readers of
/// one spelling silently took 10000 from files of the other.
[[nodiscard]] inline double rope_theta(const ConfigFields& config, const ConfigFields* rope,
                                       std::vector<std::string>& warnings) {
  const auto outer = config.positive("rope_theta");
  const auto inner = rope == nullptr ? std::nullopt : rope->positive("rope_theta");
  if (inner && outer && *inner != *outer) {
    warnings.push_back(config.path() + ": two values of rope_theta; " +
                       ConfigFields::shown(*rope->find("rope_theta")) + " is used, " +
                       ConfigFields::shown(*config.find("rope_theta")) +
                       " at top level is ignored");
  }
  if (inner) return *inner;
  if (outer) return *outer;
  const nlohmann::json* parameters = config.find("rope_parameters");
  if (parameters != nullptr && parameters->is_object()) {
    const ConfigFields fields{*parameters, config.path(), "rope_parameters"};
    if (const auto theta = fields.positive("rope_theta")) return *theta;
  }
  warnings.push_back(config.path() + ": no rope_theta; 10000 is used");
  return 10000.0;
}

}  // namespace detail

/// @brief Reads rotary embedding in both spellings: `rope_theta` with `rope_scaling`, and
/// `rope_parameters`. `type` is an old name of `rope_type`.
/// @throws UnsupportedError naming a type other than default and llama3, or an unknown key.
/// @throws FormatError naming a missing or senseless field.
[[nodiscard]] inline RopeConfig read_rope_config(const detail::ConfigFields& config,
                                                 std::vector<std::string>& warnings) {
  RopeConfig result;
  std::string name;
  const nlohmann::json* object = detail::rope_object(config, name);
  if (object == nullptr) {
    result.theta = detail::rope_theta(config, nullptr, warnings);
    return result;
  }
  const detail::ConfigFields rope{*object, config.path(), name};
  const char* type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  const auto type = rope.text(type_key);
  if (!type && rope.find("factor") != nullptr)
    rope.refuse("rope_type", "is missing beside 'factor'");
  result.type = type.value_or("default");
  if (result.type != "default" && result.type != "llama3") {
    rope.refuse_unsupported(type_key, *rope.find(type_key));
  }
  detail::refuse_unknown_rope_keys(rope);
  result.theta = detail::rope_theta(config, &rope, warnings);
  if (result.type == "llama3") detail::read_llama3(config, rope, result);
  return result;
}

}  // namespace block_streamer::inline v1
