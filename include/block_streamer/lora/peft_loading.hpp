// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/name_pattern.hpp>
#include <block_streamer/checkpoint/peft_config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/lora/module_patterns.hpp>

#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {
namespace detail {

/// Names one after another, the first few of them.
[[nodiscard]] inline std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 5; ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > 5) text += " and " + std::to_string(names.size() - 5) + " more";
  return text;
}

/// The names that a file may use for a module of ours: with and without the wrappers of PEFT and of
/// multimodal models around the language model.
[[nodiscard]] inline std::string plain_module_name(std::string name) {
  constexpr std::string_view peft = "base_model.model.";
  if (name.starts_with(peft)) name.erase(0, peft.size());
  for (const std::string_view wrapper : {"model.language_model.", "language_model.model."}) {
    if (name.starts_with(wrapper)) return "model." + name.substr(wrapper.size());
  }
  return name;
}

/// One factor in the file.
struct LoraKey {
  std::string module;
  bool is_b = false;
};

/// nullopt for a key that is no LoRA factor of a linear map.
[[nodiscard]] inline std::optional<LoraKey> parse_lora_key(const std::string& key) {
  for (const bool is_b : {false, true}) {
    const std::string suffix = is_b ? ".lora_B.weight" : ".lora_A.weight";
    if (!key.ends_with(suffix)) continue;
    return LoraKey{plain_module_name(key.substr(0, key.size() - suffix.size())), is_b};
  }
  return std::nullopt;
}

/// Which sites a configuration adapts.
[[nodiscard]] inline std::vector<LoraSite> configured_sites(const PeftConfig& config,
                                                            const std::vector<LoraSite>& sites,
                                                            const std::string& where) {
  std::optional<NamePattern> target;
  std::optional<NamePattern> exclude;
  if (config.target_pattern) target.emplace(*config.target_pattern, where);
  if (config.exclude_pattern) exclude.emplace(*config.exclude_pattern, where);
  if (config.target_pattern && config.layers_to_transform)
    throw FormatError{where, "\"layers_to_transform\" needs a list of target modules"};
  const auto named = [](const LoraSite& site, const std::vector<std::string>& names) {
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return is_target(site, name); });
  };
  const auto in_layers = [&](const LoraSite& site) {
    if (!config.layers_to_transform) return true;
    const auto& layers = *config.layers_to_transform;
    if (!site.layer || std::find(layers.begin(), layers.end(), *site.layer) == layers.end())
      return false;
    const std::string tail = "." + std::to_string(*site.layer) + "." + site.relative;
    const std::string stem = without_suffix(site.module, tail);
    return config.layers_pattern.empty() ||
           std::any_of(config.layers_pattern.begin(), config.layers_pattern.end(),
                       [&](const std::string& p) { return has_name_suffix(stem, p); });
  };
  std::vector<LoraSite> chosen;
  for (const LoraSite& site : sites) {
    if (exclude ? exclude->matches(site.module) : named(site, config.exclude_modules)) continue;
    if (target ? !target->matches(site.module) : !named(site, config.target_modules)) continue;
    if (in_layers(site)) chosen.push_back(site);
  }
  return chosen;
}

/// Keys of an adapter's file by module, A then B. @throws BindingError for a key twice.
using LoraKeys = std::map<std::string, std::pair<std::string, std::string>>;
[[nodiscard]] inline LoraKeys lora_keys(const Checkpoint& file, std::vector<std::string>& unknown) {
  LoraKeys keys;
  for (const StoredTensor& tensor : file.tensors()) {
    const auto key = parse_lora_key(tensor.spec.name);
    if (!key) {
      unknown.push_back(tensor.spec.name);
      continue;
    }
    auto& pair = keys[key->module];
    std::string& slot = key->is_b ? pair.second : pair.first;
    if (!slot.empty())
      throw BindingError{file.files()[0].string() + ": " + slot + " and " + tensor.spec.name +
                         " are the same tensor"};
    slot = tensor.spec.name;
  }
  for (const UnsupportedTensor& tensor : file.unsupported()) unknown.push_back(tensor.name);
  return keys;
}

/// Takes each site's keys out of the file's, and refuses what is left over or missing.
[[nodiscard]] inline std::vector<std::pair<std::string, std::string>> match_keys(
    const Checkpoint& file, const std::vector<LoraSite>& chosen) {
  const std::string path = file.files()[0].string();
  std::vector<std::string> unknown;
  std::vector<std::string> missing;
  LoraKeys keys = lora_keys(file, unknown);
  std::vector<std::pair<std::string, std::string>> matched;
  for (const LoraSite& site : chosen) {
    auto found = keys.find(site.module);
    if (found == keys.end() && site.module.starts_with("model."))
      found = keys.find(site.module.substr(6));
    std::pair<std::string, std::string> pair;
    if (found != keys.end()) pair = keys.extract(found).mapped();
    if (pair.first.empty()) missing.push_back(site.module + ".lora_A.weight");
    if (pair.second.empty()) missing.push_back(site.module + ".lora_B.weight");
    matched.push_back(std::move(pair));
  }
  for (const auto& [module, pair] : keys) {
    for (const std::string& name : {pair.first, pair.second}) {
      if (!name.empty()) unknown.push_back(name);
    }
  }
  std::string what;
  if (!missing.empty())
    what += "; the configuration promises tensors that are missing: " + listed(missing);
  if (!unknown.empty())
    what += "; tensors that belong to no adapted module of this model: " + listed(unknown);
  if (!what.empty()) throw BindingError{path + ": " + what.substr(2)};
  return matched;
}

/// One factor in fp32, its shape checked before anything is allocated.
[[nodiscard]] inline at::Tensor load_factor(const Checkpoint& file, const std::string& name,
                                            const Shape& shape, const at::Device& device) {
  const TensorSpec& spec = file.at(name).spec;
  const std::string place = file.files()[0].string() + ": tensor " + name;
  if (spec.shape != shape)
    throw BindingError{place + " has shape " + to_string(spec.shape) +
                       ", the model and the configuration ask for " + to_string(shape)};
  if (!is_computable(spec.dtype))
    throw BindingError{place + " has type " + std::string{name_of(spec.dtype)} +
                       ", which is no plain float"};
  const at::Tensor loaded = load_tensor(file, name, DType::f32);
  if (!at::isfinite(loaded).all().item<bool>()) {
    throw Error{place + " holds a value that is not finite in fp32; the adapter is of no use"};
  }
  return trainable_leaf(loaded, device);
}

[[nodiscard]] inline LoraOptions options_of(const PeftConfig& config, const SavedTargets& saved) {
  return {.rank = config.rank,
          .alpha = config.alpha,
          .dropout = config.dropout,
          .targets = saved.modules,
          .use_rslora = config.use_rslora};
}
}  // namespace detail

/// @brief Reads an adapter in PEFT's format for the blocks of a model: every tensor of the file is
/// used, every targeted module gets its two, or nothing is.
/// Ranks and scales of single modules (rank_pattern, alpha_pattern) are honoured; names may carry
/// PEFT's and multimodal wrappers' prefixes, or none. The tensors are fp32 and trainable.
/// @throws UnsupportedError naming an option that is not implemented; BindingError naming tensors
/// that are missing, unknown or of another shape, or if no module matches; Error naming a tensor
/// that is not finite; FormatError, StorageError for broken or unreadable files.
[[nodiscard]] inline LoraAdapter load_adapter(const std::filesystem::path& folder,
                                              std::span<const LoraBlock> blocks,
                                              const at::Device& device) {
  const std::filesystem::path config_path = folder / "adapter_config.json";
  const PeftConfig config =
      parse_peft_config(config_path.string(), read_small_file(config_path, std::uint64_t{1} << 24));
  const Checkpoint file = Checkpoint::open(folder / "adapter_model.safetensors");
  const std::vector<LoraSite> sites = lora_sites(blocks);
  const std::vector<LoraSite> chosen =
      detail::configured_sites(config, sites, config_path.string());
  if (chosen.empty())
    throw BindingError{config_path.string() +
                       ": the adapter's targets match no linear map of this "
                       "model"};
  SavedTargets saved = saved_targets_of(sites, chosen);
  const LoraOptions options = detail::options_of(config, saved);
  validate(options);
  const auto keys = detail::match_keys(file, chosen);
  std::vector<LoraModule> modules;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const LoraSite& site = chosen[i];
    LoraModule module{.site = site, .a = {}, .b = {}};
    module.rank =
        detail::pattern_value(config.rank_pattern, site.module, config.rank, config_path.string());
    module.alpha = detail::pattern_value(config.alpha_pattern, site.module, config.alpha,
                                         config_path.string());
    try {
      validate({.rank = module.rank, .alpha = module.alpha});
    } catch (const Error& error) {
      throw UnsupportedError{config_path.string() + ": " + site.module + ": " + error.what()};
    }
    module.a = detail::load_factor(file, keys[i].first, {module.rank, site.in}, device);
    module.b = detail::load_factor(file, keys[i].second, {site.out, module.rank}, device);
    modules.push_back(std::move(module));
  }
  return {options, blocks.size(), std::move(modules), std::move(saved)};
}

}  // namespace block_streamer::inline v1
