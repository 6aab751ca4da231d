// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "interrupt.hpp"
#include "model_files.hpp"
#include "model_runner.hpp"
#include "run_report.hpp"
#include "usage_error.hpp"

#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/name_pattern.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/run_folder.hpp>
#include <block_streamer/os/folder_lock.hpp>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer_cli {
namespace {

struct Command {
  CommonOptions common;
  FinetuneOptions options;
};

/// The output folder while the program runs: nobody else works in it. Made if there is none, and
/// removed again if nothing comes into it.
class OutputClaim {
 public:
  explicit OutputClaim(std::filesystem::path folder)
      : folder_{std::move(folder)},
        existed_{is_there(folder_)},
        lock_{block_streamer::FolderLock::of(folder_)} {}
  OutputClaim(const OutputClaim&) = delete;
  OutputClaim& operator=(const OutputClaim&) = delete;
  ~OutputClaim() {
    std::error_code ignored;
    if (!existed_) std::filesystem::remove(folder_, ignored);  // only an empty one goes
  }

 private:
  static bool is_there(const std::filesystem::path& folder) {
    std::error_code ignored;
    return std::filesystem::exists(folder, ignored);
  }

  std::filesystem::path folder_;
  bool existed_;
  block_streamer::FolderLock lock_;
};

/// Before anything changes: --output names a folder, and neither the model's nor that of the
/// adapter that the run begins with, which would be replaced so that the run could not be taken up
/// again.
void expect_output_folder(const std::filesystem::path& model, const FinetuneOptions& options) {
  namespace fs = std::filesystem;
  std::error_code error;
  const std::string name = options.output.string();
  if (fs::exists(options.output, error) && !fs::is_directory(options.output, error)) {
    throw block_streamer::Error{name + " is a file; --output names a folder"};
  }
  if (!options.adapter.empty() && fs::equivalent(options.adapter, options.output, error)) {
    throw block_streamer::Error{"--adapter and --output are one folder, " + name +
                                ": a run needs the adapter that it began with to be resumed; name "
                                "another --output"};
  }
  if (fs::equivalent(require_model_folder(model), options.output, error)) {
    throw block_streamer::Error{
        "--model and --output are one folder, " + name +
        ": what is trained gets a folder of its own; name another --output"};
  }
}

/// What another kind of run left beside would be taken for a part of this one's result.
void expect_same_kind(const std::filesystem::path& model, const FinetuneOptions& options) {
  namespace fs = std::filesystem;
  const auto holds = [&](const char* file) {
    std::error_code error;
    return fs::exists(options.output / file, error);
  };
  const auto refuse = [&](const std::string& what) {
    throw block_streamer::Error{options.output.string() + " holds " + what +
                                ": name another --output"};
  };
  const bool config = holds("config.json");
  if (options.mode == FinetuneMode::lora && config) refuse("a model, where an adapter is to go");
  if (options.mode == FinetuneMode::lora) return;
  if (holds("adapter_config.json")) refuse("an adapter, where a model is to go");
  const auto text = [](const fs::path& folder) {
    return block_streamer::read_small_file(folder / "config.json", std::uint64_t{1} << 28);
  };
  if (config && text(options.output) != text(require_model_folder(model)))
    refuse("a model of another configuration");
}

/// Before anything is trained: the folder holds nothing that is not to be replaced.
void expect_free_or_resumable(const FinetuneOptions& options) {
  const std::string name = options.output.string();
  const block_streamer::RunFolder folder{options.output};
  if (!folder.is_replaceable()) {
    throw block_streamer::Error{name +
                                " holds files that are neither a run nor an adapter, which are all "
                                "that --overwrite replaces; name another --output"};
  }
  if (options.overwrite || folder.is_free()) return;
  if (!options.resume) {
    throw block_streamer::Error{name + " is not empty; --overwrite begins a new run" +
                                (folder.holds_run() ? ", --resume goes on with the one in it"
                                                    : " in place of what it holds")};
  }
  if (!folder.holds_run()) {
    throw block_streamer::Error{name + " holds an adapter, but no run to resume (" +
                                folder.state().string() +
                                " is missing); --overwrite begins a new one"};
  }
}

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
      {!options.adapter.empty(), "--adapter"}};
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

int run(const Command& command) {
  const FinetuneOptions& options = command.options;
  expect_consistent(command.common);
  expect_consistent(options);
  if (options.mode == FinetuneMode::full) expect_full_mode(command.common, options);
  require_readable(options.data);
  require_readable(options.eval_data);
  expect_output_folder(command.common.model, options);
  const OutputClaim claim{options.output};
  expect_free_or_resumable(options);
  expect_same_kind(command.common.model, options);
  require_writable(command.common, {{"--data", options.data},
                                    {"--eval-data", options.eval_data},
                                    {"--adapter", options.adapter},
                                    {"--output", options.output}});
  const ModelText text{command.common.model};
  const std::unique_ptr<TrainingRunner> runner = open(command);
  catch_interrupts();
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

std::string check_fraction(const std::string& text) {
  double value = 0;
  const bool number = CLI::detail::lexical_cast(text, value);
  return number && value > 0 && value <= 1 ? std::string{} : "'" + text + "' is not in (0, 1]";
}

std::string check_not_negative(const std::string& text) {
  double value = 0;
  const bool number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
  return number && value >= 0 ? std::string{} : "'" + text + "' is no number from 0 on";
}

std::string check_dropout(const std::string& text) {
  double value = 0;
  const bool number = CLI::detail::lexical_cast(text, value);
  return number && value >= 0 && value < 1 ? std::string{} : "'" + text + "' is not in [0, 1)";
}

/// An option whose value is one of these names: the message for another lists them all.
template <class Value>
CLI::Option* add_choice(CLI::App& app, const std::string& name, Value& to,
                        const std::map<std::string, Value>& choices,
                        const std::string& description) {
  std::vector<std::string> names;
  for (const auto& [choice, value] : choices) names.push_back(choice);
  return app
      .add_option_function<std::string>(
          name, [&to, choices](const std::string& given) { to = choices.at(given); }, description)
      ->check(CLI::IsMember(names))
      ->type_name("CHOICE");
}

/// "device", "ram" or "file:DIR".
std::string read_activations(const std::string& text, block_streamer::ActivationOptions& to) {
  using block_streamer::ActivationPlace;
  const std::string file = "file:";
  if (text == "device") {
    to = {};
  } else if (text == "ram") {
    to = {ActivationPlace::ram, {}};
  } else if (text.starts_with(file) && text.size() > file.size()) {
    to = {ActivationPlace::file, text.substr(file.size())};
  } else {
    return "'" + text + "' is none of device, ram, file:DIR";
  }
  return {};
}

void add_memory_options(CLI::App& app, Command& command) {
  const std::string group = "Memory";
  app.add_option_function<std::string>(
         "--activations",
         [&command](const std::string& text) {
           const std::string wrong = read_activations(text, command.common.activations);
           if (!wrong.empty()) throw CLI::ValidationError("--activations", wrong);
         },
         "where the blocks' inputs wait for the backward: device (default), ram (page-locked), or "
         "file:DIR, a file in that folder, which wears the drive")
      ->type_name("device|ram|file:DIR")
      ->group(group);
  using block_streamer::MicroBatchOrder;
  add_choice<MicroBatchOrder>(
      app, "--micro-batches", command.options.micro_batches,
      {{"together", MicroBatchOrder::together}, {"sequential", MicroBatchOrder::sequential}},
      "how the passes of a step (--grad-accum) go through the blocks: together, each "
      "block read once for all (default), or sequential, which holds the inputs of one "
      "pass at a time")
      ->group(group);
}

void add_training_options(CLI::App& app, FinetuneOptions& options) {
  const std::string group = "Training";
  const auto count = whole_number(1, std::uint64_t{1} << 31);
  auto* steps = app.add_option("--steps", options.steps, "optimizer steps");
  app.add_option("--epochs", options.epochs, "walks over the data instead (default: 1)")
      ->transform(count)
      ->excludes(steps)
      ->type_name("N")
      ->group(group);
  steps->transform(count)->type_name("N")->group(group);
  app.add_option("--batch", options.batch, "rows that share a pass")
      ->transform(count)
      ->type_name("B")
      ->group(group)
      ->capture_default_str();
  app.add_option("--grad-accum", options.grad_accum, "passes a step")
      ->transform(count)
      ->type_name("K")
      ->group(group)
      ->capture_default_str();
  app.add_option("--seq-len", options.seq_len, "longest row, in tokens")
      ->type_name("T")
      ->transform(whole_number(2, std::uint64_t{1} << 31))
      ->group(group)
      ->capture_default_str();
  app.add_flag("--pack", options.pack,
               "several short rows share one of --seq-len tokens; they do not see each other")
      ->group(group);
  app.add_option("--lr", options.learning_rate,
                 "learning rate (default: 0.0002; with --mode full 0.00002)")
      ->type_name("RATE")
      ->check(check_positive)
      ->group(group);
  app.add_option("--weight-decay", options.weight_decay,
                 "matrices shrink by this times the rate in each step, norms and biases do not")
      ->type_name("D")
      ->check(check_not_negative)
      ->group(group)
      ->capture_default_str();
  using block_streamer::ScheduleShape;
  add_choice<ScheduleShape>(
      app, "--schedule", options.schedule,
      {{"constant", ScheduleShape::constant},
       {"linear", ScheduleShape::linear},
       {"cosine", ScheduleShape::cosine}},
      "of the learning rate after the warm-up: constant (default), or to 0 at the end")
      ->group(group);
  app.add_option("--warmup-steps", options.warmup_steps, "in which the learning rate rises from 0")
      ->transform(whole_number(0, std::uint64_t{1} << 31))
      ->type_name("N")
      ->group(group)
      ->capture_default_str();
  app.add_option("--max-grad-norm", options.max_grad_norm,
                 "scales a larger gradient down to this (default: never)")
      ->check(check_positive)
      ->type_name("X")
      ->group(group);
  app.add_flag("--shuffle,!--no-shuffle", options.shuffle,
               "another order of rows each epoch, by the seed (default), or the file's")
      ->group(group);
  app.add_flag("--skip-non-finite", options.skip_non_finite,
               "go on after a step whose loss or gradient is not finite, which changes nothing")
      ->group(group);
  app.add_option("--seed", options.seed, "of the adapter's start, the order of rows and dropout")
      ->transform(whole_number())
      ->type_name("S")
      ->group(group)
      ->capture_default_str();
}

/// "NAME=VALUE", the name a regular expression that may hold '=' itself.
template <class Value>
void add_pattern(CLI::App& app, const std::string& name, const std::string& description,
                 std::vector<std::pair<std::string, Value>>& to, const std::string& group) {
  app.add_option_function<std::vector<std::string>>(
         name,
         [&to, name](const std::vector<std::string>& given) {
           for (const std::string& text : given) {
             const std::size_t at = text.rfind('=');
             Value value{};
             if (at == 0 || at == std::string::npos ||
                 !CLI::detail::lexical_cast(text.substr(at + 1), value) ||
                 !check_positive(text.substr(at + 1)).empty()) {
               throw CLI::ValidationError(name, "'" + text + "' is not NAME=NUMBER, above 0");
             }
             to.emplace_back(text.substr(0, at), value);
           }
         },
         description)
      ->type_name("NAME=X")
      ->allow_extra_args(false)
      ->group(group);
}

void add_pattern_options(CLI::App& app, AdapterOptions& form, const std::string& group) {
  add_pattern(app, "--rank-pattern",
              "a rank of its own for maps whose name ends so; may be repeated, the first counts",
              form.rank_pattern, group);
  add_pattern(app, "--alpha-pattern", "the same for alpha", form.alpha_pattern, group);
  app.add_flag("--rslora", form.use_rslora, "the adapter counts alpha / sqrt(rank)")->group(group);
}

void add_adapter_options(CLI::App& app, FinetuneOptions& options) {
  const std::string group = "Adapter";
  AdapterOptions& form = options.adapter_options;
  app.add_option("--rank", form.rank, "(default: 16)")
      ->transform(whole_number(1, 65536))
      ->type_name("R")
      ->group(group);
  app.add_option("--alpha", form.alpha, "the adapter counts alpha / rank (default: 32)")
      ->check(check_positive)
      ->type_name("A")
      ->group(group);
  app.add_option("--dropout", form.dropout, "on the adapters' inputs (default: 0)")
      ->check(check_dropout)
      ->type_name("P")
      ->group(group);
  auto* targets =
      app.add_option("--targets", form.targets,
                     "projections: all-linear, or names such as q_proj,v_proj (default: "
                     "all-linear)")
          ->delimiter(',')
          ->type_name("NAME,…")
          ->group(group);
  app.add_option("--target-regex", form.target_pattern,
                 "projections whose whole name this matches, such as .*[.][0-3][.]mlp[.].*")
      ->excludes(targets)
      ->type_name("REGEX")
      ->group(group);
  add_pattern_options(app, form, group);
  app.add_option("--top-fraction", form.top_fraction,
                 "of the layers, counted from the last (default: 1)")
      ->check(check_fraction)
      ->type_name("F")
      ->group(group);
  app.add_option("--adapter", options.adapter,
                 "go on with this adapter; options above that disagree with it are refused")
      ->type_name("DIR")
      ->group(group);
}

}  // namespace

void add_finetune_command(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  FinetuneOptions& options = command->options;
  CLI::App* app =
      program.add_subcommand("finetune",
                             "Trains a LoRA adapter and writes it in PEFT's format, or all "
                             "parameters and writes a model folder");
  add_common_options(*app, command->common);
  app->add_option(
         "--data", options.data,
         "what to train on: .txt, or .jsonl rows with text, prompt and completion, or messages")
      ->required()
      ->type_name("FILE");
  app->add_option("--output", options.output, "where the adapter or the model goes")
      ->required()
      ->type_name("DIR");
  add_choice<FinetuneMode>(*app, "--mode", options.mode,
                           {{"lora", FinetuneMode::lora}, {"full", FinetuneMode::full}},
                           "what trains: an adapter (default), or every parameter");
  auto* overwrite = app->add_flag("--overwrite", options.overwrite, "begin anew in --output");
  app->add_flag("--resume", options.resume, "go on with the run in --output, or begin it")
      ->excludes(overwrite);
  app->add_option("--save-every", options.save_every,
                  "save after every N steps (default: every 10 minutes), and at the end")
      ->transform(whole_number(1, std::uint64_t{1} << 31))
      ->type_name("N");
  app->add_option("--eval-data", options.eval_data, "print the loss on this before and after")
      ->type_name("FILE");
  add_adapter_options(*app, options);
  add_training_options(*app, options);
  add_memory_options(*app, *command);
  app->footer(
      "Example:\n  block-streamer finetune --model models/SmolLM2-135M-Instruct --data "
      "examples/data/genesis.txt --output adapters/genesis --steps 10 --seq-len 256");
  app->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace block_streamer_cli
