// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "finetune_options.hpp"
#include "interrupt.hpp"
#include "model_files.hpp"
#include "model_runner.hpp"
#include "output_folder.hpp"
#include "run_report.hpp"
#include "usage_error.hpp"

#include <block_streamer/checkpoint/name_pattern.hpp>
#include <block_streamer/core/error.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {
namespace {

struct Command {
  CommonOptions common;
  FinetuneOptions options;
};

void expect_pattern(const std::string& option, const std::string& pattern,
                    block_streamer::NamePattern::Extent extent) {
  try {
    const block_streamer::NamePattern compiles{pattern, option, extent};
  } catch (const block_streamer::Error& error) {
    throw UsageError{error.what()};
  }
}

/// What only an adapter has, and where only what stays as it is can be, mean nothing where all
/// parameters train.
void expect_full_mode(const CommonOptions& common, const FinetuneOptions& options) {
  const AdapterOptions& form = options.adapter_options;
  const std::vector<std::pair<bool, std::string>> given{
      {form.rank.has_value(), "--rank"},
      {form.alpha.has_value(), "--alpha"},
      {form.dropout.has_value(), "--dropout"},
      {!form.targets.empty(), "--targets"},
      {form.target_pattern.has_value(), "--target-regex"},
      {!form.rank_pattern.empty(), "--rank-pattern"},
      {!form.alpha_pattern.empty(), "--alpha-pattern"},
      {form.use_rslora, "--rslora"},
      {form.top_fraction.has_value(), "--top-fraction"},
      {!options.adapter.empty(), "--adapter"},
      {options.graph, "--graph"}};
  for (const auto& [is_given, name] : given) {
    if (is_given) throw UsageError{name + " is of an adapter, and --mode full trains none"};
  }
  const std::string& storage = common.storage;
  if (storage != "auto" && storage != "ram" && storage != "pinned") {
    throw UsageError{"--storage " + storage +
                     ": with --mode full the weights are in memory, where they change (ram)"};
  }
  if (common.ram_budget)
    throw UsageError{"--ram-budget: with --mode full all weights are in memory"};
  if (common.resident != "auto" && common.resident != "all") {
    throw UsageError{"--resident " + common.resident +
                     ": with --mode full embedding and head train, and stay on the device"};
  }
}

/// What is wrong whatever model and data hold.
void expect_consistent(const FinetuneOptions& options) {
  require_rows("--data", options.data);
  require_rows("--eval-data", options.eval_data);
  using Extent = block_streamer::NamePattern::Extent;
  const AdapterOptions& form = options.adapter_options;
  if (form.target_pattern) expect_pattern("--target-regex", *form.target_pattern, Extent::whole);
  for (const auto& [name, rank] : form.rank_pattern) {
    expect_pattern("--rank-pattern", name, Extent::end);
  }
  for (const auto& [name, alpha] : form.alpha_pattern) {
    expect_pattern("--alpha-pattern", name, Extent::end);
  }
  if (options.eval_every && options.eval_data.empty() && !options.eval_fraction)
    throw UsageError{"--eval-every needs --eval-data or --eval-fraction: rows that do not train"};
  if (!options.steps) return;
  const std::string fault = warmup_fault(options, *options.steps);
  if (!fault.empty()) throw UsageError{fault};
}

std::unique_ptr<TrainingRunner> open(const Command& command) {
  const FinetuneOptions& options = command.options;
  if (options.mode == FinetuneMode::full) return open_full_runner(command.common, options);
  std::unique_ptr<ModelRunner> runner = open_runner(command.common);
  if (!options.adapter.empty()) runner->load_adapters({options.adapter});
  return runner;
}

int run(Command command) {
  const FinetuneOptions& options = command.options;
  expect_consistent(command.common);
  expect_consistent(options);
  if (options.mode == FinetuneMode::full) expect_full_mode(command.common, options);
  require_readable(options.data);
  require_readable(options.eval_data);
  expect_output_folder(command.common.model, options);
  catch_interrupts();
  const OutputClaim claim{options.output};
  expect_free_or_resumable(options);
  expect_same_kind(command.common.model, options);
  require_writable(command.common, {{"--data", options.data},
                                    {"--eval-data", options.eval_data},
                                    {"--adapter", options.adapter},
                                    {"--output", options.output}});
  take_up_dtype(command.common, options);
  const ModelText text{command.common.model};
  const std::unique_ptr<TrainingRunner> runner = open(command);
  if (interrupted()) return interrupted_exit_code;
  const FinetuneReport report =
      runner->finetune({text.tokenizer(), text.try_chat_template(), options});
  say_memory(runner->memory());
  write_reports(command.common, *runner,
                {.seconds = report.seconds,
                 .tokens = report.tokens,
                 .steps = report.steps,
                 .bytes_needed = report.bytes_needed,
                 .bytes_read = report.bytes_read});
  return report.interrupted ? interrupted_exit_code : 0;
}

}  // namespace

void add_finetune_command(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  CLI::App* app =
      program.add_subcommand("finetune",
                             "Trains a LoRA adapter and writes it in PEFT's format, or all "
                             "parameters and writes a model folder");
  add_finetune_options(*app, command->common, command->options);
  app->footer(
      "Example:\n  block-streamer finetune --model models/SmolLM2-135M-Instruct --data "
      "examples/data/genesis.txt --output adapters/genesis --steps 10 --seq-len 256");
  app->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace block_streamer_cli
