// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "console.hpp"
#include "jobs.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/lora_adapter.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace block_streamer_cli {
namespace detail {

[[noreturn]] inline void refuse_option(const FinetuneOptions& options, const std::string& given,
                                       const std::string& adapter) {
  throw block_streamer::Error{given + " disagrees with the adapter in " + options.adapter.string() +
                              ", " + adapter +
                              "; leave the option out, or start a new adapter without --adapter"};
}

/// "3", "0.05": as a user would write it.
[[nodiscard]] inline std::string plain_number(double value) {
  std::string text = readable_number(value, 6);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

/// What each value of `values` says of the adapter: one number, or that there are several.
template <class Values>
[[nodiscard]] std::string all_of(const std::string& what, const Values& values) {
  if (values.size() > 1) return "whose modules differ in their " + what;
  return "whose " + what + " is " + plain_number(static_cast<double>(*values.begin()));
}

inline void expect_same_places(const FinetuneOptions& options,
                               const block_streamer::LoraAdapter& adapter,
                               std::span<const block_streamer::LoraBlock> blocks) {
  std::set<std::size_t> layers;
  std::set<std::string> modules;
  for (const auto& module : adapter.modules()) {
    layers.insert(module.site.block);
    modules.insert(module.site.module);
  }
  const AdapterOptions& wanted = options.adapter_options;
  if (wanted.top_fraction) {
    const std::size_t count = block_streamer::layer_count_of(*wanted.top_fraction, blocks.size());
    if (layers.size() != count || *layers.begin() != blocks.size() - count) {
      refuse_option(options, "--top-fraction " + plain_number(*wanted.top_fraction),
                    "which changes " + std::to_string(layers.size()) + " of " +
                        std::to_string(blocks.size()) + " layers, from layer " +
                        std::to_string(*layers.begin()) + " on");
    }
  }
  if (wanted.targets.empty() && !wanted.target_pattern) return;
  const auto sites = block_streamer::lora_sites(blocks);
  std::set<std::string> named;
  for (const auto& site : wanted.target_pattern
                              ? block_streamer::match_target_pattern(sites, *wanted.target_pattern)
                              : block_streamer::match_targets(sites, wanted.targets)) {
    if (layers.contains(site.block)) named.insert(site.module);
  }
  if (named == modules) return;
  std::string given, has;
  for (const std::string& target : wanted.targets) given += (given.empty() ? "" : ",") + target;
  for (const std::string& name : adapter.saved_targets().modules) has += " " + name;
  refuse_option(
      options,
      wanted.target_pattern ? "--target-regex " + *wanted.target_pattern : "--targets " + given,
      "whose targets are" + has);
}

/// Patterns speak of an adapter that is made; one that is there has its ranks and alphas.
inline void expect_own_patterns(const FinetuneOptions& options,
                                const block_streamer::LoraAdapter& adapter) {
  const AdapterOptions& wanted = options.adapter_options;
  if (!wanted.rank_pattern.empty())
    refuse_option(options, "--rank-pattern", "which has ranks already");
  if (!wanted.alpha_pattern.empty())
    refuse_option(options, "--alpha-pattern", "which has alphas already");
  if (wanted.use_rslora && !adapter.options().use_rslora)
    refuse_option(options, "--rslora", "which is scaled by alpha / rank");
}

}  // namespace detail

/// @brief What the command line says of the adapter's form must be what the loaded adapter has.
/// @throws Error naming the first option that disagrees, and both values.
inline void expect_agreement(const FinetuneOptions& options,
                             const block_streamer::LoraAdapter& adapter,
                             std::span<const block_streamer::LoraBlock> blocks) {
  const AdapterOptions& wanted = options.adapter_options;
  std::set<std::uint64_t> ranks;
  std::set<double> alphas;
  for (const auto& module : adapter.modules()) {
    ranks.insert(module.rank);
    alphas.insert(module.alpha);
  }
  if (wanted.rank && ranks != std::set<std::uint64_t>{*wanted.rank}) {
    detail::refuse_option(options, "--rank " + std::to_string(*wanted.rank),
                          detail::all_of("rank", ranks));
  }
  if (wanted.alpha && alphas != std::set<double>{*wanted.alpha}) {
    detail::refuse_option(options, "--alpha " + detail::plain_number(*wanted.alpha),
                          detail::all_of("alpha", alphas));
  }
  detail::expect_own_patterns(options, adapter);
  const double dropout = adapter.options().dropout;
  if (wanted.dropout && *wanted.dropout != dropout) {
    detail::refuse_option(options, "--dropout " + detail::plain_number(*wanted.dropout),
                          "whose dropout is " + detail::plain_number(dropout));
  }
  detail::expect_same_places(options, adapter, blocks);
}

}  // namespace block_streamer_cli
