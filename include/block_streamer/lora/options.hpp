// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief What a LoRA adapter looks like before it has weights.
/// Each targeted map gets y = W·x + scale·B·A·x with A: (rank, in) and B: (out, rank).
struct LoraOptions {
  std::uint64_t rank = 16;
  double alpha = 32;
  double dropout = 0;  ///< probability in [0, 1), on the adapter's own input, while training
  /// Module names as PEFT matches them: "all-linear", or suffixes such as "q_proj",
  /// "self_attn.q_proj", "model.layers.3.mlp.down_proj".
  std::vector<std::string> targets{"all-linear"};
  /// A regular expression over whole module names, as PEFT takes one for its targets; used instead
  /// of `targets` where it is given.
  std::optional<std::string> target_pattern{};
  double top_fraction = 1;  ///< of the layers, counted from the last: see layer_count_of()
  bool use_rslora = false;  ///< scale = alpha / sqrt(rank) instead of alpha / rank
  /// Ranks and alphas of single modules: the first pattern that matches the end of a module's name
  /// (whole components, a regular expression) gives the value, else `rank` and `alpha` do.
  std::vector<std::pair<std::string, std::uint64_t>> rank_pattern{};
  std::vector<std::pair<std::string, double>> alpha_pattern{};
  std::uint64_t seed = 0;  ///< of the generator that fills A; nothing else draws from it
};

/// @brief Refuses options that describe no adapter.
/// @throws UnsupportedError naming the option and its value.
inline void validate(const LoraOptions& options) {
  const auto refuse = [](const std::string& what) { throw UnsupportedError{"LoRA: " + what}; };
  const auto is_alpha = [](double alpha) {
    return alpha > 0 && alpha <= std::numeric_limits<float>::max();
  };
  const std::string is_no_alpha = "must be a number above 0 that fp32 can hold";
  if (options.rank == 0 || options.rank > 65536)
    refuse("rank must lie in 1 … 65536, not " + std::to_string(options.rank));
  if (!is_alpha(options.alpha)) refuse("alpha " + is_no_alpha);
  if (!(options.dropout >= 0 && options.dropout < 1))
    refuse("dropout must lie in [0, 1), not " + std::to_string(options.dropout));
  if (!(options.top_fraction > 0 && options.top_fraction <= 1))
    refuse("top fraction must lie in (0, 1], not " + std::to_string(options.top_fraction));
  for (const auto& [pattern, rank] : options.rank_pattern) {
    if (rank == 0 || rank > 65536)
      refuse("rank of \"" + pattern + "\" must lie in 1 … 65536, not " + std::to_string(rank));
  }
  for (const auto& [pattern, alpha] : options.alpha_pattern) {
    if (!is_alpha(alpha)) refuse("alpha of \"" + pattern + "\" " + is_no_alpha);
  }
  if (options.targets.empty()) refuse("no target module is named (\"all-linear\" takes all)");
}

/// @brief The factor on B·A·x: alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA.
[[nodiscard]] inline double lora_scale(double alpha, std::uint64_t rank, bool use_rslora) noexcept {
  const auto r = static_cast<double>(rank);
  return use_rslora ? alpha / std::sqrt(r) : alpha / r;
}

/// @brief How many of `layer_count` layers a top fraction takes: the smallest whole number that is
/// not below fraction · layers (up to 1e-9, so that 0.1 of 30 is 3 in binary arithmetic too).
/// Never 0 for a valid fraction of at least one layer.
[[nodiscard]] inline std::size_t layer_count_of(double top_fraction,
                                                std::size_t layer_count) noexcept {
  const double exact = top_fraction * static_cast<double>(layer_count);
  const auto count = static_cast<std::size_t>(std::ceil(exact - 1e-9));
  if (count == 0) return layer_count == 0 ? 0 : 1;
  return count < layer_count ? count : layer_count;
}

}  // namespace block_streamer::inline v1
