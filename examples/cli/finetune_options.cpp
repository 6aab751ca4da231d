// SPDX-License-Identifier: Apache-2.0
#include "finetune_options.hpp"

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {
namespace {

std::string check_fraction(const std::string& text) {
  double value = 0;
  const bool number = CLI::detail::lexical_cast(text, value);
  return number && value > 0 && value <= 1 ? std::string{} : "'" + text + "' is not in (0, 1]";
}

std::string check_part(const std::string& text) {
  double value = 0;
  const bool number = CLI::detail::lexical_cast(text, value);
  return number && value > 0 && value < 1 ? std::string{} : "'" + text + "' is not in (0, 1)";
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

void add_memory_options(CLI::App& app, CommonOptions& common, FinetuneOptions& options) {
  const std::string group = "Memory";
  app.add_option_function<std::string>(
         "--activations",
         [&common](const std::string& text) {
           const std::string wrong = read_activations(text, common.activations);
           if (!wrong.empty()) throw CLI::ValidationError("--activations", wrong);
         },
         "where the blocks' inputs wait for the backward: device (default), ram (page-locked), or "
         "file:DIR, a file in that folder, which wears the drive")
      ->type_name("device|ram|file:DIR")
      ->group(group);
  using block_streamer::MicroBatchOrder;
  add_choice<MicroBatchOrder>(
      app, "--micro-batches", options.micro_batches,
      {{"together", MicroBatchOrder::together}, {"sequential", MicroBatchOrder::sequential}},
      "how the passes of a step (--grad-accum) go through the blocks: together, each "
      "block read once for all (default), or sequential, which holds the inputs of one "
      "pass at a time")
      ->group(group);
}

void add_evaluation_options(CLI::App& app, FinetuneOptions& options) {
  const std::string group = "Held-out rows";
  auto* data = app.add_option("--eval-data", options.eval_data,
                              "print the loss on this before and after the training")
                   ->type_name("FILE")
                   ->group(group);
  app.add_option("--eval-fraction", options.eval_fraction,
                 "instead: on this share of the rows of --data, which do not train")
      ->check(check_part)
      ->excludes(data)
      ->type_name("F")
      ->group(group);
  app.add_option("--eval-every", options.eval_every, "print it after every N steps as well")
      ->transform(whole_number(1, std::uint64_t{1} << 31))
      ->type_name("N")
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
  app.add_flag("--graph", options.graph,
               "records passes of one shape in a CUDA graph and replays them (--storage ram)")
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
      "of the learning rate after the warm-up: constant (default), or linear or cosine down to 0")
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
          ->transform([](const std::string& name) { return CLI::detail::trim_copy(name); })
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

void add_finetune_options(CLI::App& app, CommonOptions& common, FinetuneOptions& options) {
  add_common_options(app, common);
  app.add_option(
         "--data", options.data,
         "what to train on: .txt, or .jsonl rows with text, prompt and completion, or messages")
      ->required()
      ->type_name("FILE");
  app.add_option("--output", options.output, "where the adapter or the model goes")
      ->required()
      ->type_name("DIR");
  add_choice<FinetuneMode>(app, "--mode", options.mode,
                           {{"lora", FinetuneMode::lora}, {"full", FinetuneMode::full}},
                           "what trains: an adapter (default), or every parameter");
  auto* overwrite = app.add_flag("--overwrite", options.overwrite, "begin anew in --output");
  app.add_flag("--resume", options.resume, "go on with the run in --output, or begin it")
      ->excludes(overwrite);
  app.add_option("--save-every", options.save_every,
                 "save after every N steps (default: every 10 minutes), and at the end")
      ->transform(whole_number(1, std::uint64_t{1} << 31))
      ->type_name("N");
  add_evaluation_options(app, options);
  add_adapter_options(app, options);
  add_training_options(app, options);
  add_memory_options(app, common, options);
}

}  // namespace block_streamer_cli
