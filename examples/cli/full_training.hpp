// SPDX-License-Identifier: Apache-2.0
// What of a finetune is peculiar to training all parameters.
#pragma once

#include "full_model.hpp"
#include "jobs.hpp"
#include "run_forecast.hpp"
#include "run_product.hpp"

#include <block_streamer/finetune/run_record.hpp>
#include <block_streamer/models/resident_parameters.hpp>
#include <block_streamer/text/text_dataset.hpp>

#include <algorithm>
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

/// @brief Adds what the gradients of a step take until they are added up.
/// @param largest  parameters of the largest block. @param head  of the head.
inline void add_gradients_in_flight(block_streamer::MemoryForecast& forecast, std::uint64_t item,
                                    std::uint64_t largest, std::uint64_t head) {
  forecast.visit += item * largest;
  // A chunk's gradient of the head beside that of the chunks before; or that in fp32.
  forecast.head += head * (item == 4 ? 4 : std::max<std::uint64_t>(2 * item, item + 4));
}

template <class Backend>
class FullTraining {
 public:
  using Loaded = FullModel<Backend>;

  FullTraining(Loaded& loaded, const FinetuneOptions& options)
      : loaded_{loaded}, options_{options} {}

  void add_to(block_streamer::RunRecord&) const {}
  [[nodiscard]] std::unique_ptr<RunProduct> product() const {
    return std::make_unique<ModelProduct>(loaded_.parameters(), loaded_.files(),
                                          loaded_.residents());
  }
  /// What it takes at least was said before anything was read. @see expect_full_memory
  void forecast(std::span<const block_streamer::TextRow> rows, std::uint64_t rows_a_step) const {
    auto work = training_work(loaded_, options_, rows, rows_a_step);
    work.kept_inputs = loaded_.streamer().block_count();
    block_streamer::MemoryForecast forecast = loaded_.memory().standing;
    block_streamer::add_work(forecast, work, loaded_.memory().offloads_inputs);
    add_gradients_in_flight(forecast, work.item, loaded_.largest_block(),
                            static_cast<std::uint64_t>(loaded_.model().head().numel()));
    loaded_.memory().expect(forecast);
  }
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
  const FinetuneOptions& options_;
};

}  // namespace block_streamer_cli
