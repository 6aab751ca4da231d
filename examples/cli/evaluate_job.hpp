// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "console.hpp"
#include "interrupt.hpp"
#include "jobs.hpp"
#include "loaded_model.hpp"
#include "run_forecast.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/evaluation.hpp>
#include <block_streamer/text/text_dataset.hpp>

#include <chrono>
#include <string>

namespace block_streamer_cli {

/// @brief Reads a file of rows for this model. @param tell  says what was cut off or left out.
[[nodiscard]] inline block_streamer::TextDataset open_rows(
    const std::filesystem::path& path, const block_streamer::Tokenizer& tokenizer,
    const block_streamer::ChatTemplate* chat_template, std::uint64_t seq_len,
    const block_streamer::ModelConfig& config, bool keep_short_window, bool tell = true) {
  if (seq_len > config.max_position) {
    throw block_streamer::Error{"--seq-len " + std::to_string(seq_len) +
                                " is longer than the model's " +
                                std::to_string(config.max_position) + " positions"};
  }
  block_streamer::TextDatasetOptions options;
  options.seq_len = seq_len;
  options.eos = config.eos_ids.empty() ? -1 : static_cast<std::int32_t>(config.eos_ids.front());
  options.keep_short_window = keep_short_window;
  auto data = block_streamer::TextDataset::open(path, tokenizer, chat_template, options);
  if (!tell) return data;
  if (data.truncated_rows() > 0) {
    say(path.string() + ": " + counted(data.truncated_rows(), "row") +
        " longer than --seq-len, cut off there");
  }
  if (data.dropped_rows() > 0) {
    say(path.string() + ": " + counted(data.dropped_rows(), "row") +
        " left out, where no token is trained");
  }
  return data;
}

/// @brief Mean loss over the rows, with progress on standard error.
/// @param graph  passes of one shape are recorded in a graph of the device and replayed.
template <class Loaded>
[[nodiscard]] block_streamer::Evaluation evaluate_with_progress(
    Loaded& loaded, std::span<const block_streamer::TextRow> rows, const std::string& what,
    bool graph = false) {
  constexpr std::size_t rows_a_pass = 4;
  forecast_evaluation(loaded, rows, rows_a_pass);
  Progress progress{what, rows.size()};
  const auto evaluate = [&](auto&& forwards) {
    return block_streamer::evaluate_rows(
        loaded.model(), loaded.streamer(), rows, rows_a_pass,
        [&](std::size_t done) {
          progress.update(done, "");
          return !interrupted();
        },
        [&](const at::Tensor& hidden, auto& context) { return forwards.forward(hidden, context); });
  };
  return graph ? evaluate(loaded.streamer().capture()) : evaluate(loaded.streamer());
}

/// @brief The mean loss over the data.
template <class Backend>
[[nodiscard]] EvaluateReport run_evaluate(LoadedModel<Backend>& loaded, const EvaluateJob& job) {
  const auto data =
      open_rows(job.options.data, job.tokenizer, job.chat_template, job.options.seq_len,
                loaded.model().config(), /*keep_short_window=*/true);
  const auto begin = std::chrono::steady_clock::now();
  const auto evaluation = evaluate_with_progress(loaded, data.rows(), "row", job.options.graph);
  EvaluateReport report{evaluation.mean_loss, evaluation.scored, evaluation.tokens, 0,
                        interrupted()};
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace block_streamer_cli
