// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/adapter_table.hpp>
#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/core/tensor_spec.hpp>
#include <block_streamer/lora/lora_projection.hpp>
#include <block_streamer/lora/module_patterns.hpp>
#include <block_streamer/lora/options.hpp>
#include <block_streamer/lora/saved_targets.hpp>
#include <block_streamer/lora/target_matching.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// One adapted linear map with its tensors.
struct LoraModule {
  LoraSite site;
  std::uint64_t rank = 0;  ///< its own: a rank pattern may differ from the adapter's rank
  double alpha = 0;
  at::Tensor a;  ///< (rank, in), fp32 leaf on the compute device, requires_grad
  at::Tensor b;  ///< (out, rank), the same
};

/// @brief A LoRA adapter: its options, and which tensors stand for which name.
/// A handle: copies share the tensors, so training through table() is what saving writes.
/// **Threads.** Externally synchronised.
class LoraAdapter {
 public:
  LoraAdapter() = default;
  /// @param saved  how a file names the modules.
  LoraAdapter(LoraOptions options, std::size_t block_count, std::vector<LoraModule> modules,
              SavedTargets saved)
      : options_{std::move(options)},
        block_count_{block_count},
        modules_{std::move(modules)},
        saved_{std::move(saved)} {}

  [[nodiscard]] const LoraOptions& options() const noexcept { return options_; }
  [[nodiscard]] std::span<const LoraModule> modules() const noexcept { return modules_; }
  [[nodiscard]] std::size_t block_count() const noexcept { return block_count_; }
  [[nodiscard]] const SavedTargets& saved_targets() const noexcept { return saved_; }

  /// @brief All trainable tensors in list order, A before B.
  [[nodiscard]] std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const LoraModule& module : modules_) all.insert(all.end(), {module.a, module.b});
    return all;
  }

  /// @brief The same tensors under PEFT's names, in the order of parameters().
  [[nodiscard]] NamedTensors named_parameters() const {
    NamedTensors all;
    for (const LoraModule& module : modules_) {
      const std::string prefix = "base_model.model." + module.site.module;
      all.push_back({prefix + ".lora_A.weight", module.a});
      all.push_back({prefix + ".lora_B.weight", module.b});
    }
    return all;
  }

  /// @brief Number of trainable elements.
  [[nodiscard]] std::uint64_t parameter_count() const {
    std::uint64_t count = 0;
    for (const LoraModule& module : modules_)
      count += static_cast<std::uint64_t>(module.a.numel() + module.b.numel());
    return count;
  }

  /// @brief What a streamer takes: one entry per block, `by_weight` indexed as its weight_specs().
  /// @param blocks  the list that the adapter was made for.
  [[nodiscard]] AdapterTable table(std::span<const LoraBlock> blocks) const {
    expects(blocks.size() == block_count_, "the adapter was made for another number of blocks");
    AdapterTable table;
    table.blocks.resize(blocks.size());
    for (const LoraModule& module : modules_) {
      BlockAdapters& entry = table.blocks[module.site.block];
      entry.by_weight.resize(blocks[module.site.block].specs.size());
      const double scale = lora_scale(module.alpha, module.rank, options_.use_rslora);
      entry.by_weight.at(module.site.weight) =
          std::make_unique<LoraProjection>(module.a, module.b, scale, options_.dropout);
      entry.parameters.insert(entry.parameters.end(), {module.a, module.b});
    }
    return table;
  }

 private:
  LoraOptions options_;
  std::size_t block_count_ = 0;
  std::vector<LoraModule> modules_;
  SavedTargets saved_;
};

namespace detail {
/// A fresh leaf on `device` with the bits of `values`. Usable for training even if made inside
/// InferenceMode.
[[nodiscard]] inline at::Tensor trainable_leaf(const at::Tensor& values, const at::Device& device) {
  const c10::InferenceMode normal{false};
  at::Tensor leaf = values.to(device, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  return leaf.detach().set_requires_grad(true);
}

/// kaiming_uniform with a = sqrt(5): uniform within ± 1/sqrt(in), drawn on the CPU so that a seed
/// means the same adapter on every device.
[[nodiscard]] inline LoraModule initial_module(LoraSite site, const LoraOptions& options,
                                               at::Generator generator, const at::Device& device) {
  const std::uint64_t own_rank =
      pattern_value(options.rank_pattern, site.module, options.rank, "LoRA rank pattern");
  const double own_alpha =
      pattern_value(options.alpha_pattern, site.module, options.alpha, "LoRA alpha pattern");
  if (own_rank > std::min(site.in, site.out))
    throw UnsupportedError{"LoRA: rank " + std::to_string(own_rank) + " is above what " +
                           site.module + " of shape " + to_string({site.out, site.in}) +
                           " can have"};
  const auto rank = static_cast<std::int64_t>(own_rank);
  const double bound = 1 / std::sqrt(static_cast<double>(site.in));
  const auto on_cpu = at::TensorOptions().dtype(at::kFloat).device(at::kCPU);
  at::Tensor a = at::empty({rank, static_cast<std::int64_t>(site.in)}, on_cpu);
  a.uniform_(-bound, bound, std::move(generator));
  const at::Tensor b = at::zeros({static_cast<std::int64_t>(site.out), rank}, on_cpu);
  return {.site = std::move(site),
          .rank = own_rank,
          .alpha = own_alpha,
          .a = trainable_leaf(a, device),
          .b = trainable_leaf(b, device)};
}
}  // namespace detail

/// @brief A new adapter with PEFT's initialisation: A uniform within ± 1/sqrt(in), B zero, so the
/// model computes what it computed before.
/// @param device  the compute device; the tensors are fp32 whatever the base's dtype.
/// @throws UnsupportedError, BindingError as validate() and match_targets(); also if a top fraction
/// is asked for and the blocks' prefixes end in no layer number (the files could not say it), a
/// rank is above a map's smaller dimension, or a pattern matches nothing.
[[nodiscard]] inline LoraAdapter make_lora_adapter(std::span<const LoraBlock> blocks,
                                                   const LoraOptions& options,
                                                   const at::Device& device) {
  validate(options);
  const std::size_t adapted = layer_count_of(options.top_fraction, blocks.size());
  const std::size_t first = blocks.size() - adapted;
  if (first > 0 && !layer_index_of(blocks[first].prefix))
    throw UnsupportedError{"LoRA: a top fraction needs numbered layers, not \"" +
                           blocks[first].prefix + "\""};
  const std::vector<LoraSite> sites = lora_sites(blocks);
  std::vector<LoraSite> chosen = options.target_pattern
                                     ? match_target_pattern(sites, *options.target_pattern)
                                     : match_targets(sites, options.targets);
  std::erase_if(chosen, [first](const LoraSite& site) { return site.block < first; });
  if (chosen.empty())
    throw BindingError{"LoRA: the targets name no linear map in the last " +
                       std::to_string(adapted) + " layers"};
  detail::expect_patterns_match(options.rank_pattern, chosen, "LoRA rank pattern");
  detail::expect_patterns_match(options.alpha_pattern, chosen, "LoRA alpha pattern");
  SavedTargets saved = saved_targets_of(sites, chosen);
  const at::Generator generator = at::detail::createCPUGenerator(options.seed);
  std::vector<LoraModule> modules;
  modules.reserve(chosen.size());
  for (LoraSite& site : chosen)
    modules.push_back(detail::initial_module(std::move(site), options, generator, device));
  return {options, blocks.size(), std::move(modules), std::move(saved)};
}

}  // namespace block_streamer::inline v1
