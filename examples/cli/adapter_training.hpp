// SPDX-License-Identifier: Apache-2.0
// What of a finetune is peculiar to an adapter.
#pragma once

#include "adapter_agreement.hpp"
#include "finetune_record.hpp"
#include "jobs.hpp"
#include "loaded_model.hpp"
#include "run_forecast.hpp"
#include "run_product.hpp"

#include <block_streamer/finetune/run_record.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/resident_parameters.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace block_streamer_cli {

/// Trains the adapter that is woven in, or a new one.
template <class Backend>
class AdapterTraining {
 public:
  using Loaded = LoadedModel<Backend>;

  AdapterTraining(Loaded& loaded, const FinetuneOptions& options)
      : loaded_{loaded}, options_{options} {
    if (loaded.adapter()) {
      expect_agreement(options, *loaded.adapter(), loaded.lora_blocks());
    } else {
      loaded.attach(new_adapter(options));
    }
  }

  void add_to(block_streamer::RunRecord& record) const {
    add_adapter_form(record, *loaded_.adapter());
  }
  [[nodiscard]] std::unique_ptr<RunProduct> product() const {
    return std::make_unique<AdapterProduct>(*loaded_.adapter(),
                                            loaded_.model().checkpoint().folder().string());
  }
  void forecast(std::span<const block_streamer::TextRow> rows, std::uint64_t rows_a_step) const {
    forecast_training(loaded_, options_, rows, rows_a_step);
  }
  [[nodiscard]] std::uint64_t parameter_count() const {
    return loaded_.adapter()->parameter_count();
  }
  /// @brief Parameters beside those of the checkpoint.
  [[nodiscard]] std::uint64_t added_count() const { return parameter_count(); }
  /// @brief What messages call the parameters.
  [[nodiscard]] std::vector<std::string> labels() const {
    std::vector<std::string> labels;
    for (const auto& module : loaded_.adapter()->modules()) {
      const std::string place =
          "block " + std::to_string(module.site.block) + " (" + module.site.module + ".lora_";
      labels.insert(labels.end(), {place + "A)", place + "B)"});
    }
    return labels;
  }
  [[nodiscard]] block_streamer::models::ResidentParameters* residents() const noexcept {
    return nullptr;
  }

 private:
  [[nodiscard]] block_streamer::LoraAdapter new_adapter(const FinetuneOptions& options) const {
    const AdapterOptions& wanted = options.adapter_options;
    block_streamer::LoraOptions lora;
    lora.rank = wanted.rank.value_or(lora.rank);
    lora.alpha = wanted.alpha.value_or(lora.alpha);
    lora.dropout = wanted.dropout.value_or(lora.dropout);
    if (!wanted.targets.empty()) lora.targets = wanted.targets;
    lora.target_pattern = wanted.target_pattern;
    lora.rank_pattern = wanted.rank_pattern;
    lora.alpha_pattern = wanted.alpha_pattern;
    lora.use_rslora = wanted.use_rslora;
    lora.top_fraction = wanted.top_fraction.value_or(lora.top_fraction);
    lora.seed = options.seed;
    return block_streamer::make_lora_adapter(loaded_.lora_blocks(), lora, loaded_.model().device());
  }

  Loaded& loaded_;
  const FinetuneOptions& options_;
};

}  // namespace block_streamer_cli
