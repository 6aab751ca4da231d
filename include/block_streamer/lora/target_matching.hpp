// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// What the block list offers to adapters: per block its specs and the name that they are under.
struct LoraBlock {
  std::string prefix;  ///< "model.layers.3", with or without a final dot
  std::vector<WeightSpec> specs;
};

/// @brief The list as adapters see it.
/// @param layout  the blocks' prefixes in the checkpoint, e.g. ModelLayout::blocks.
template <streamable_block Block>
[[nodiscard]] std::vector<LoraBlock> lora_blocks_of(std::span<const Block> blocks,
                                                    std::span<const BlockTensors> layout) {
  expects(blocks.size() == layout.size(), "every block has its prefix");
  std::vector<LoraBlock> list;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    list.push_back({.prefix = layout[i].prefix, .specs = blocks[i].weight_specs()});
  return list;
}

/// One linear map that an adapter can be woven into.
struct LoraSite {
  std::string module;    ///< full name without ".weight": "model.layers.3.self_attn.q_proj"
  std::string relative;  ///< within its block: "self_attn.q_proj"
  std::optional<std::uint64_t> layer;  ///< the number that the block's prefix ends in
  std::size_t block = 0;               ///< position in the list
  std::size_t weight = 0;              ///< index into the block's weight_specs()
  std::uint64_t in = 0;
  std::uint64_t out = 0;
};

namespace detail {
/// "self_attn.q_proj" for a suffix "q_proj": whole name components only, so "proj" does not match.
[[nodiscard]] inline bool has_name_suffix(std::string_view name, std::string_view suffix) {
  if (suffix.empty() || !name.ends_with(suffix)) return false;
  return name.size() == suffix.size() || name[name.size() - suffix.size() - 1] == '.';
}

[[nodiscard]] inline std::string_view last_component(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

[[nodiscard]] inline std::string without_suffix(std::string text, std::string_view suffix) {
  if (text.ends_with(suffix)) text.resize(text.size() - suffix.size());
  return text;
}

[[noreturn]] inline void refuse_target(const std::string& target,
                                       const std::vector<LoraSite>& sites) {
  const std::string_view last = last_component(target);
  if (last == "embed_tokens" || last == "lm_head")
    throw UnsupportedError{"LoRA target \"" + target +
                           "\": adapters on the embedding and the output head are not implemented; "
                           "name projections of the layers, or \"all-linear\""};
  std::set<std::string> known;
  for (const LoraSite& site : sites) known.emplace(last_component(site.module));
  std::string text = "LoRA target \"" + target + "\" matches no linear map of the model; it has";
  for (const std::string& name : known) text += " " + name;
  throw BindingError{known.empty() ? text + " none" : text};
}
}  // namespace detail

/// @brief The number at the end of a block's prefix, its layer index in the checkpoint's naming.
[[nodiscard]] inline std::optional<std::uint64_t> layer_index_of(std::string_view prefix) {
  if (prefix.ends_with('.')) prefix.remove_suffix(1);
  const std::string_view digits = detail::last_component(prefix);
  std::uint64_t index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (error != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return index;
}

/// @brief Every projection of every block, in list order.
/// @throws ContractViolation if a projection is not a 2-D "….weight".
[[nodiscard]] inline std::vector<LoraSite> lora_sites(std::span<const LoraBlock> blocks) {
  std::vector<LoraSite> sites;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const std::string prefix = detail::without_suffix(blocks[b].prefix, ".");
    for (std::size_t w = 0; w < blocks[b].specs.size(); ++w) {
      const WeightSpec& spec = blocks[b].specs[w];
      if (!spec.projection) continue;
      expects(spec.shape.size() == 2, "a projection's weight is (out, in)");
      const std::string name = detail::without_suffix(spec.name, ".weight");
      sites.push_back({.module = prefix.empty() ? name : prefix + "." + name,
                       .relative = name,
                       .layer = layer_index_of(prefix),
                       .block = b,
                       .weight = w,
                       .in = spec.shape[1],
                       .out = spec.shape[0]});
    }
  }
  return sites;
}

/// @brief True if a target names the site, by PEFT's rule.
[[nodiscard]] inline bool is_target(const LoraSite& site, const std::string& target) {
  return target == "all-linear" || detail::has_name_suffix(site.module, target);
}

/// @brief The sites that `targets` name, in list order: PEFT's rule, a target is a whole name or
/// its last components; "all-linear" is every projection.
/// @throws BindingError if a target matches nothing, listing what there is.
/// @throws UnsupportedError for the embedding or the output head.
[[nodiscard]] inline std::vector<LoraSite> match_targets(const std::vector<LoraSite>& sites,
                                                         std::span<const std::string> targets) {
  std::vector<bool> taken(sites.size(), false);
  for (const std::string& target : targets) {
    bool found = false;
    for (std::size_t i = 0; i < sites.size(); ++i) {
      if (!is_target(sites[i], target)) continue;
      taken[i] = found = true;
    }
    if (!found) detail::refuse_target(target, sites);
  }
  std::vector<LoraSite> matched;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    if (taken[i]) matched.push_back(sites[i]);
  }
  return matched;
}

}  // namespace block_streamer::inline v1
