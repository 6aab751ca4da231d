// SPDX-License-Identifier: Apache-2.0
// What of a finetune is peculiar to training all parameters.
#pragma once

#include "full_model.hpp"
#include "jobs.hpp"
#include "run_product.hpp"

#include <block_streamer/finetune/run_record.hpp>
#include <block_streamer/models/resident_parameters.hpp>
#include <block_streamer/text/text_dataset.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace block_streamer_cli {

/// An evaluation between the steps takes less than they do.
template <class Backend>
void forecast_evaluation(FullModel<Backend>&, std::span<const block_streamer::TextRow>,
                         std::uint64_t) {}

template <class Backend>
class FullTraining {
 public:
  using Loaded = FullModel<Backend>;

  FullTraining(Loaded& loaded, const FinetuneOptions&) : loaded_{loaded} {}

  void add_to(block_streamer::RunRecord&) const {}
  [[nodiscard]] std::unique_ptr<RunProduct> product() const {
    return std::make_unique<ModelProduct>(loaded_.parameters(), loaded_.files(),
                                          loaded_.residents());
  }
  /// What it takes was said before anything was read. @see expect_full_memory
  void forecast(std::span<const block_streamer::TextRow>, std::uint64_t) const {}
  [[nodiscard]] std::uint64_t parameter_count() const {
    std::uint64_t count = 0;
    for (const auto& [name, tensor] : loaded_.parameters())
      count += static_cast<std::uint64_t>(tensor.numel());
    return count;
  }
  [[nodiscard]] static constexpr std::uint64_t added_count() noexcept { return 0; }
  [[nodiscard]] std::vector<std::string> labels() const {
    const auto& blocks = loaded_.model().layout().blocks;
    std::vector<std::string> labels;
    for (const auto& [name, tensor] : loaded_.parameters()) {
      std::string label = name;
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (name.starts_with(blocks[i].prefix))
          label = "block " + std::to_string(i) + " (" + name + ")";
      }
      labels.push_back(std::move(label));
    }
    return labels;
  }
  [[nodiscard]] block_streamer::models::ResidentParameters* residents() const noexcept {
    return &loaded_.residents();
  }

 private:
  Loaded& loaded_;
};

}  // namespace block_streamer_cli
