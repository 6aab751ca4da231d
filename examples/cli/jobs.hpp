// SPDX-License-Identifier: Apache-2.0
// What the commands ask of a ModelRunner, in plain types.
#pragma once

#include "console.hpp"

#include <block_streamer/finetune/micro_batch_order.hpp>
#include <block_streamer/generate/generation.hpp>
#include <block_streamer/optim/schedule.hpp>
#include <block_streamer/text/chat_template.hpp>
#include <block_streamer/text/tokenizer.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// Prompts that share every pass.
struct GenerateJob {
  const block_streamer::Tokenizer& tokenizer;
  std::vector<std::vector<std::int32_t>> prompts;  ///< ids
  block_streamer::GenerationOptions options;
  block_streamer::GenerationObserver observer;
};
using GenerateReport = block_streamer::GenerationReport;

/// The form of an adapter. What the command line did not say is empty.
struct AdapterOptions {
  std::optional<std::uint64_t> rank;
  std::optional<double> alpha;
  std::optional<double> dropout;
  std::vector<std::string> targets;
  std::optional<std::string> target_pattern;
  std::vector<std::pair<std::string, std::uint64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  bool use_rslora = false;
  std::optional<double> top_fraction;
};

/// What trains.
enum class FinetuneMode : std::uint8_t {
  lora,  ///< an adapter
  full,  ///< every parameter of the model
};

struct FinetuneOptions {
  FinetuneMode mode = FinetuneMode::lora;
  std::filesystem::path data;
  std::filesystem::path output;
  std::filesystem::path eval_data;          ///< empty: none
  std::optional<double> eval_fraction;      ///< of the data's rows, held out; empty: none
  std::optional<std::uint64_t> eval_every;  ///< steps; empty: before and after the training
  std::filesystem::path adapter;            ///< to go on from; empty: a new one
  bool overwrite = false;
  AdapterOptions adapter_options;
  std::optional<std::uint64_t> steps;
  std::optional<std::uint64_t> epochs;
  std::uint64_t batch = 1;
  std::uint64_t grad_accum = 1;
  block_streamer::MicroBatchOrder micro_batches = block_streamer::MicroBatchOrder::together;
  std::uint64_t seq_len = 512;
  bool pack = false;                    ///< several rows in one of at most seq_len tokens
  bool graph = false;                   ///< passes of one shape are recorded once and replayed
  std::optional<double> learning_rate;  ///< empty: the mode's
  double weight_decay = 0.01;
  block_streamer::ScheduleShape schedule = block_streamer::ScheduleShape::constant;
  std::uint64_t warmup_steps = 0;
  std::optional<double> max_grad_norm;
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::optional<std::uint64_t> save_every;  ///< steps; empty: by time
  bool resume = false;
  bool skip_non_finite = false;
};

/// @brief The highest learning rate of the run.
[[nodiscard]] inline double peak_rate(const FinetuneOptions& options) {
  return options.learning_rate.value_or(options.mode == FinetuneMode::full ? 2e-5 : 2e-4);
}

/// @brief What is wrong with the warm-up of a run of so many steps; empty: nothing.
[[nodiscard]] inline std::string warmup_fault(const FinetuneOptions& options, std::uint64_t steps) {
  if (options.warmup_steps == 0 || options.warmup_steps < steps) return {};
  return "--warmup-steps " + std::to_string(options.warmup_steps) + ": the run has only " +
         counted(steps, "step");
}

struct FinetuneJob {
  const block_streamer::Tokenizer& tokenizer;
  const block_streamer::ChatTemplate* chat_template;  ///< null: the model has none
  const FinetuneOptions& options;
};
struct FinetuneReport {
  std::uint64_t steps = 0;
  std::uint64_t tokens = 0;  ///< that went through the model in training
  double seconds = 0;
  std::uint64_t bytes_needed = 0;  ///< fetched in these seconds
  std::uint64_t bytes_read = 0;
  bool interrupted = false;
};

struct EvaluateOptions {
  std::filesystem::path data;
  std::vector<std::filesystem::path> adapters;  ///< empty: none; several: their sum
  std::uint64_t seq_len = 512;
  bool graph = false;  ///< passes of one shape are recorded once and replayed
};

struct EvaluateJob {
  const block_streamer::Tokenizer& tokenizer;
  const block_streamer::ChatTemplate* chat_template;  ///< null: the model has none
  const EvaluateOptions& options;
};
struct EvaluateReport {
  double mean_loss = 0;      ///< nats per scored token
  std::uint64_t scored = 0;  ///< tokens
  std::uint64_t tokens = 0;  ///< that went through the model
  double seconds = 0;
  bool interrupted = false;
};

}  // namespace block_streamer_cli
