// SPDX-License-Identifier: Apache-2.0
// What memory a job will take, before it runs.
#pragma once

#include "jobs.hpp"
#include "loaded_model.hpp"

#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/plan/memory_forecast.hpp>
#include <block_streamer/text/text_dataset.hpp>
#include <block_streamer/train/chunked_loss.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

namespace block_streamer_cli {

/// @brief Passes of so many tokens without a backward, the logits of `scored` of them taken.
/// @tparam Loaded  LoadedModel or FullModel.
template <class Loaded>
[[nodiscard]] block_streamer::DecoderWork forward_work(const Loaded& loaded, std::uint64_t tokens,
                                                       std::uint64_t scored) {
  const block_streamer::ModelConfig& config = loaded.model().config();
  block_streamer::DecoderWork work;
  work.widths = {config.hidden_size, config.intermediate_size, config.head_count * config.head_dim,
                 config.kv_head_count * config.head_dim, config.model_type == "qwen3"};
  work.vocabulary = config.vocabulary_size;
  work.tokens = tokens;
  work.item = block_streamer::byte_count_of(loaded.model().dtype());
  work.scored = scored;
  work.head_rows = std::numeric_limits<std::uint64_t>::max();
  const auto& slices = loaded.model().head_slices();
  if (slices.size() > 1) work.head_slice_rows = slices.front().count;
  work.adapters = loaded.adapter_parameters() > 0;
  return work;
}

/// @brief Positions whose logits a loss takes at once.
template <class Loaded>
[[nodiscard]] std::uint64_t loss_rows(const Loaded& loaded) {
  if (!loaded.model().head_is_resident()) return std::numeric_limits<std::uint64_t>::max();
  const block_streamer::ChunkedLossOptions options;
  return std::max<std::uint64_t>(
      1, options.logits_byte_count / 4 / loaded.model().config().vocabulary_size);
}

[[nodiscard]] inline std::uint64_t longest_row(std::span<const block_streamer::TextRow> rows) {
  std::uint64_t longest = 1;
  for (const auto& row : rows) longest = std::max<std::uint64_t>(longest, row.tokens.size());
  return longest;
}

/// @param cache  bytes of keys and values.
template <class Backend>
void expect_forward(LoadedModel<Backend>& loaded, const block_streamer::DecoderWork& work,
                    std::uint64_t cache = 0) {
  block_streamer::MemoryForecast forecast = loaded.memory().standing;
  forecast.trained = 4 * loaded.adapter_parameters();
  forecast.cache = cache;
  block_streamer::add_work(forecast, work, /*offloaded=*/false);
  loaded.memory().expect(forecast);
}

/// @brief Of an evaluation, `batch` rows a pass.
template <class Backend>
void forecast_evaluation(LoadedModel<Backend>& loaded,
                         std::span<const block_streamer::TextRow> rows, std::uint64_t batch) {
  const std::uint64_t tokens = std::min<std::uint64_t>(batch, rows.size()) * longest_row(rows);
  auto work = forward_work(loaded, tokens, tokens);
  work.head_rows = loss_rows(loaded);
  expect_forward(loaded, work);
}

/// @brief Of prompts that share every pass, with the cache for all that may follow.
template <class Backend>
void forecast_generation(LoadedModel<Backend>& loaded, const GenerateJob& job) {
  std::uint64_t longest = 0;
  for (const auto& prompt : job.prompts) longest = std::max<std::uint64_t>(longest, prompt.size());
  const std::uint64_t batch = job.prompts.size();
  const auto work = forward_work(loaded, batch * longest, batch);
  const std::uint64_t capacity =
      std::min(longest + job.options.max_new_tokens, loaded.model().config().max_position);
  expect_forward(
      loaded, work,
      2 * loaded.model().config().layer_count * batch * capacity * work.widths.key * work.item);
}

/// @brief Steps of a training, but for what trains and the blocks that the backward comes down to.
/// @param rows_a_step  rows of a step.
template <class Loaded>
[[nodiscard]] block_streamer::DecoderWork training_work(
    const Loaded& loaded, const FinetuneOptions& options,
    std::span<const block_streamer::TextRow> rows, std::uint64_t rows_a_step) {
  const std::uint64_t batch = std::min(options.batch, rows_a_step);
  const std::uint64_t tokens = batch * longest_row(rows);
  auto work = forward_work(loaded, tokens, tokens - batch);
  work.head_rows = loss_rows(loaded);
  if (options.micro_batches == block_streamer::MicroBatchOrder::together)
    work.passes = (rows_a_step + batch - 1) / batch;
  return work;
}

/// @brief Of a training of the adapter that is woven in. Nothing is predicted without one.
template <class Backend>
void forecast_training(LoadedModel<Backend>& loaded, const FinetuneOptions& options,
                       std::span<const block_streamer::TextRow> rows, std::uint64_t rows_a_step) {
  if (!loaded.adapter()) return;
  auto work = training_work(loaded, options, rows, rows_a_step);
  std::uint64_t lowest = loaded.streamer().block_count();
  for (const auto& module : loaded.adapter()->modules())
    lowest = std::min<std::uint64_t>(lowest, module.site.block);
  work.kept_inputs = loaded.streamer().block_count() - lowest;
  work.dropout = loaded.adapter()->options().dropout > 0;
  block_streamer::MemoryForecast forecast = loaded.memory().standing;
  constexpr std::uint64_t tensors = 4;  // itself, gradient and two moments, in fp32
  forecast.trained = tensors * 4 * loaded.adapter()->parameter_count();
  block_streamer::add_work(forecast, work, loaded.memory().offloads_inputs);
  loaded.memory().expect(forecast);
}

}  // namespace block_streamer_cli
