// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "console.hpp"
#include "interrupt.hpp"
#include "model_files.hpp"
#include "model_runner.hpp"
#include "prompt_file.hpp"
#include "run_report.hpp"
#include "usage_error.hpp"

#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/atomic_replace.hpp>
#include <block_streamer/text/utf8.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

using Clock = std::chrono::steady_clock;

struct Command {
  CommonOptions common;
  std::optional<std::string> prompt;
  std::string prompt_file;  ///< "-": standard input
  bool chat = false;
  std::optional<std::string> system;
  std::vector<std::filesystem::path> adapters;
  std::uint64_t batch = 0;  ///< 0: one prompt
  std::filesystem::path output;
  bs::GenerationOptions generation;
};

bs::ModelConfig config_of(const CommonOptions& options) {
  std::vector<std::string> ignored;  // the runner says them
  return bs::read_model_config(require_model_folder(options.model), ignored);
}

/// By its name; what it holds is read later.
void expect_prompt_file(const Command& command) {
  const std::filesystem::path file = command.prompt_file;
  const bool rows = file.extension() == ".jsonl";
  if (command.batch == 0 && rows) {
    throw UsageError{"--prompt-file " + command.prompt_file +
                     ": rows of a .jsonl file need --batch N and --output FILE.jsonl"};
  }
  if (command.batch != 0 && !rows && file.extension() != ".txt") {
    throw UsageError{"--prompt-file " + command.prompt_file +
                     ": prompts of a batch are read from a .txt or a .jsonl file"};
  }
}

std::vector<std::int32_t> encode(const Command& command, const ModelText& text,
                                 const Prompt& prompt) {
  if (!command.chat && prompt.messages.empty()) return text.tokenizer().encode(prompt.text);
  std::vector<bs::ChatMessage> messages = prompt.messages;
  if (messages.empty()) messages.push_back({"user", prompt.text, {}});
  if (command.system) messages.insert(messages.begin(), {"system", *command.system, {}});
  return text.chat_template().encode_prompt(text.tokenizer(), messages);
}

/// Tokens and time of the whole run, over all batches.
struct Totals {
  RunTotals run;
  std::uint64_t passes = 0;
  double decode_s = 0;
  std::uint64_t decoded = 0;  ///< tokens made after the first of each row

  void add(const GenerateReport& report) {
    run.prompt_tokens += report.prompt_tokens;
    run.tokens += report.new_tokens;
    run.prompts += report.rows.size();
    run.seconds += report.prefill_s + report.decode_s;
    passes += report.passes;
    decode_s += report.decode_s;
    decoded += report.new_tokens - std::min<std::uint64_t>(report.new_tokens, report.rows.size());
  }
  void count_bytes(const bs::Statistics& statistics) {
    run.bytes_needed = statistics.bytes_needed;
    run.bytes_read = statistics.bytes_read;
  }
};

void say_summary(const Totals& totals, const bs::Statistics& statistics,
                 const std::string& finish) {
  const double seconds = std::max(totals.run.seconds, 1e-9);
  const double fetched = static_cast<double>(statistics.bytes_needed) / 1e9;
  std::string text = finish + ": " + std::to_string(totals.run.prompt_tokens) + " prompt and " +
                     counted(totals.run.tokens, "new token") + " in " +
                     readable_number(totals.run.seconds, 2) + " s, ";
  if (totals.decoded != 0) {
    text +=
        readable_number(static_cast<double>(totals.decoded) / std::max(totals.decode_s, 1e-9), 2) +
        " tokens/s once the prompt was read, ";
  }
  say(text + readable_number(fetched / seconds, 2) + " GB/s streamed");
}

std::string words_for(bs::FinishReason reason) {
  switch (reason) {
    case bs::FinishReason::eos:
      return "finished, the model ended its text";
    case bs::FinishReason::stop_text:
      return "finished at a stop text";
    case bs::FinishReason::length:
      return "finished after --max-new-tokens";
    case bs::FinishReason::positions:
      return "finished at the model's last position";
    case bs::FinishReason::cancelled:
    case bs::FinishReason::running:
      break;
  }
  return "interrupted";
}

std::string pace(std::uint64_t new_tokens, Clock::time_point started, ModelRunner& runner) {
  const double spent = std::chrono::duration<double>(Clock::now() - started).count();
  const double seconds = std::max(spent, 1e-9);
  return readable_number(static_cast<double>(new_tokens) / seconds, 2) + " tokens/s, " +
         readable_number(static_cast<double>(runner.statistics().bytes_needed) / 1e9 / seconds, 2) +
         " GB/s";
}

void write_text(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw bs::StorageError{"standard output", "writing failed", {errno, std::generic_category()}};
  }
}

/// Ends a line of text that stands on the terminal when the run does, an error included: what is
/// said next would overwrite it.
class TextLine {
 public:
  TextLine() : terminal_{::isatty(STDOUT_FILENO) != 0} {}
  TextLine(const TextLine&) = delete;
  TextLine& operator=(const TextLine&) = delete;
  ~TextLine() { end(); }
  void write(std::string_view text) {
    write_text(text);
    if (!text.empty()) open_ = text.back() != '\n';
  }
  void end() noexcept {
    if (terminal_ && std::exchange(open_, false) && std::fputc('\n', stdout) != EOF) {
      static_cast<void>(std::fflush(stdout));
    }
  }

 private:
  bool terminal_;
  bool open_ = false;
};

int run_single(const Command& command, const ModelText& text) {
  const Prompt prompt =
      command.prompt ? Prompt{*command.prompt, {}, {}, 0} : read_single_prompt(command.prompt_file);
  bs::expect_utf8(prompt.text, command.prompt ? "--prompt" : command.prompt_file);
  GenerateJob job{text.tokenizer(), {encode(command, text, prompt)}, command.generation, {}};
  const std::unique_ptr<ModelRunner> runner = open_runner(command.common);
  if (!command.adapters.empty()) runner->load_adapters(command.adapters);
  catch_interrupts();
  TextLine line;
  Progress progress{"token", command.generation.max_new_tokens, ::isatty(STDOUT_FILENO) != 0};
  const Clock::time_point started = Clock::now();
  job.observer.text = [&](std::size_t, std::string_view piece) { line.write(piece); };
  job.observer.pass = [&](std::uint64_t n) { progress.update(n, pace(n, started, *runner)); };
  job.observer.cancelled = interrupted;
  const GenerateReport report = runner->generate(job);
  progress.finish();
  line.end();
  Totals totals;
  totals.add(report);
  const bs::FinishReason reason = report.rows.front().finish_reason;
  say_summary(totals, runner->statistics(), words_for(reason));
  totals.count_bytes(runner->statistics());
  write_reports(command.common, *runner, totals.run);
  return reason == bs::FinishReason::cancelled ? interrupted_exit_code : 0;
}

void append_rows(std::string& lines, const std::vector<Prompt>& prompts, std::size_t first,
                 const GenerateReport& report) {
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    const bs::GeneratedText& row = report.rows[i];
    nlohmann::ordered_json line = prompts[first + i].row;
    line["text"] = row.text;
    line["ids"] = row.ids;
    line["finish_reason"] = bs::name_of(row.finish_reason);
    line["prompt_tokens"] = row.prompt_token_count;
    lines += line.dump() + "\n";
  }
}

/// The prompts' ids, each of a size that the model takes: before anything large is read.
/// @throws Error naming the line of the first that cannot be one.
std::vector<std::vector<std::int32_t>> encode_all(const Command& command, const ModelText& text,
                                                  const std::vector<Prompt>& prompts,
                                                  std::uint64_t positions) {
  std::vector<std::vector<std::int32_t>> ids;
  for (const Prompt& prompt : prompts) {
    const auto refuse = [&](const std::string& what) {
      throw bs::Error{command.prompt_file + ", line " + std::to_string(prompt.line) + ": " + what};
    };
    try {
      ids.push_back(encode(command, text, prompt));
    } catch (const bs::Error& error) {
      refuse(error.what());
    }
    if (ids.back().empty()) refuse("the prompt has no token to continue from");
    if (ids.back().size() <= positions) continue;
    refuse("the prompt has " + std::to_string(ids.back().size()) +
           " tokens, the model's positions are " + std::to_string(positions) +
           " (max_position_embeddings)");
  }
  return ids;
}

int run_batch(const Command& command, const ModelText& text, std::uint64_t positions) {
  const std::vector<Prompt> prompts = read_prompts(command.prompt_file);
  const auto ids = encode_all(command, text, prompts, positions);
  const std::unique_ptr<ModelRunner> runner = open_runner(command.common);
  if (!command.adapters.empty()) runner->load_adapters(command.adapters);
  catch_interrupts();
  Progress progress{"token", prompts.size() * command.generation.max_new_tokens};
  const Clock::time_point started = Clock::now();
  Totals totals;
  std::string lines;
  for (std::size_t first = 0; first < ids.size() && !interrupted(); first += command.batch) {
    const std::size_t end = std::min<std::size_t>(ids.size(), first + command.batch);
    const auto at = [&](std::size_t i) { return ids.begin() + static_cast<std::ptrdiff_t>(i); };
    GenerateJob job{text.tokenizer(), {at(first), at(end)}, command.generation, {}};
    job.observer.pass = [&, before = totals.run.tokens](std::uint64_t n) {
      progress.update(before + n, pace(before + n, started, *runner));
    };
    job.observer.cancelled = interrupted;
    const GenerateReport report = runner->generate(job);
    totals.add(report);
    append_rows(lines, prompts, first, report);
  }
  progress.finish();
  bs::atomic_replace(command.output, lines);
  say_summary(totals, runner->statistics(),
              counted(totals.run.prompts, "prompt") + (interrupted() ? ", interrupted" : ""));
  totals.count_bytes(runner->statistics());
  write_reports(command.common, *runner, totals.run);
  return interrupted() ? interrupted_exit_code : 0;
}

int run(Command command) {
  if (!command.prompt && command.prompt_file.empty()) {
    throw UsageError{"generate needs --prompt TEXT or --prompt-file FILE"};
  }
  if (command.batch != 0 && (command.output.empty() || command.prompt_file.empty())) {
    throw UsageError{"--batch needs --prompt-file with prompts and --output for their texts"};
  }
  if (!command.prompt) expect_prompt_file(command);
  expect_consistent(command.common);
  expect_distinct_adapters(command.adapters);
  for (const std::string& stop : command.generation.stop_texts) {
    if (stop.empty()) throw UsageError{"--stop: the text is empty"};
  }
  try {
    for (const std::string& stop : command.generation.stop_texts) bs::expect_utf8(stop, "--stop");
    bs::validate(command.generation.sampling);
  } catch (const bs::Error& error) {
    throw UsageError{error.what()};
  }
  std::vector<std::pair<std::string, std::filesystem::path>> used;
  for (const auto& adapter : command.adapters) used.emplace_back("--adapter", adapter);
  require_writable(command.common, used);
  require_writable(command.output);
  used.emplace_back("--model", command.common.model);
  require_apart({"--output", command.output}, used);
  require_distinct({{"--prompt-file", command.prompt_file},
                    {"--output", command.output},
                    {"--stats", command.common.stats},
                    {"--trace", command.common.trace}});
  const ModelText text{command.common.model};
  const bs::ModelConfig config = config_of(command.common);
  command.generation.eos_ids.assign(config.eos_ids.begin(), config.eos_ids.end());
  return command.batch == 0 ? run_single(command, text)
                            : run_batch(command, text, config.max_position);
}

void add_sampling_options(CLI::App& app, bs::GenerationOptions& options) {
  const std::string group = "Sampling";
  app.add_option("--temperature", options.sampling.temperature, "0: the likeliest token")
      ->check(check_number)
      ->type_name("T")
      ->group(group)
      ->capture_default_str();
  app.add_option("--top-p", options.sampling.top_p, "only the likeliest that make up this share")
      ->check(check_number)
      ->type_name("P")
      ->group(group)
      ->capture_default_str();
  app.add_option("--top-k", options.sampling.top_k, "only so many likeliest; 0: all")
      ->transform(whole_number())
      ->type_name("K")
      ->group(group)
      ->capture_default_str();
  app.add_option("--seed", options.sampling.seed, "the same seed draws the same text")
      ->transform(whole_number())
      ->type_name("S")
      ->group(group)
      ->capture_default_str();
}

}  // namespace

void add_generate_command(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand("generate", "Continues a prompt, or answers it");
  add_common_options(*app, command->common);
  auto* prompt =
      app->add_option("--prompt", command->prompt, "the text to continue")->type_name("TEXT");
  app->add_option("--prompt-file", command->prompt_file,
                  "a file with it, without its last newline; - is standard input. With --batch: a "
                  "prompt a line of .txt, or .jsonl rows with \"prompt\" or \"messages\"")
      ->type_name("FILE")
      ->excludes(prompt);
  auto* chat = app->add_flag("--chat", command->chat,
                             "ask it as a user's message, by the model's chat template");
  app->add_option("--system", command->system, "the system message before it")
      ->type_name("TEXT")
      ->needs(chat);
  app->add_option("--max-new-tokens", command->generation.max_new_tokens, "at most so many")
      ->transform(whole_number(1, std::uint64_t{1} << 31))
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--stop", command->generation.stop_texts, "end before this text; may be repeated")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  add_adapter_folders(*app, command->adapters);
  app->add_option("--batch", command->batch, "so many prompts of --prompt-file share every pass")
      ->transform(whole_number(1, 65536))
      ->type_name("N");
  app->add_option("--output", command->output, "where the texts of a batch go")
      ->type_name("FILE.jsonl")
      ->needs("--batch");
  add_sampling_options(*app, command->generation);
  app->footer(
      "Examples:\n  block-streamer generate --model models/SmolLM2-135M-Instruct --chat "
      "--prompt \"Name three rivers in Europe.\" --max-new-tokens 64\n"
      "  block-streamer generate --model DIR --batch 8 --prompt-file prompts.txt --output "
      "texts.jsonl");
  app->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace block_streamer_cli
