// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "console.hpp"
#include "interrupt.hpp"
#include "model_files.hpp"
#include "model_runner.hpp"
#include "run_report.hpp"

#include <cmath>
#include <iostream>
#include <memory>

namespace block_streamer_cli {
namespace {

struct Command {
  CommonOptions common;
  EvaluateOptions options;
};

int run(const Command& command) {
  expect_consistent(command.common);
  expect_distinct_adapters(command.options.adapters);
  require_rows("--data", command.options.data);
  require_readable(command.options.data);
  std::vector<std::pair<std::string, std::filesystem::path>> used{{"--data", command.options.data}};
  for (const auto& adapter : command.options.adapters) used.emplace_back("--adapter", adapter);
  require_writable(command.common, std::move(used));
  catch_interrupts();
  const ModelText text{command.common.model};
  const std::unique_ptr<ModelRunner> runner = open_runner(command.common);
  if (!command.options.adapters.empty()) runner->load_adapters(command.options.adapters);
  if (interrupted()) return interrupted_exit_code;
  const EvaluateReport report =
      runner->evaluate({text.tokenizer(), text.try_chat_template(), command.options});
  if (report.interrupted) {
    say("interrupted after " + counted(report.scored, "scored token"));
    return interrupted_exit_code;
  }
  std::cout << "loss " << readable_number(report.mean_loss, 6) << " nats per token, perplexity "
            << readable_number(std::exp(report.mean_loss), 4) << ", "
            << counted(report.scored, "token") << " scored\n";
  const block_streamer::Statistics statistics = runner->statistics();
  write_reports(command.common, *runner,
                {.seconds = report.seconds,
                 .tokens = report.tokens,
                 .bytes_needed = statistics.bytes_needed,
                 .bytes_read = statistics.bytes_read});
  return 0;
}

}  // namespace

void add_evaluate_command(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  EvaluateOptions& options = command->options;
  CLI::App* app =
      program.add_subcommand("evaluate", "Prints the mean loss and the perplexity on a text");
  add_common_options(*app, command->common);
  app->add_option("--data", options.data, ".txt or .jsonl")->required()->type_name("FILE");
  add_adapter_folders(*app, options.adapters);
  app->add_option("--seq-len", options.seq_len, "tokens a window; its first one is not scored")
      ->transform(whole_number(2, std::uint64_t{1} << 31))
      ->type_name("T")
      ->capture_default_str();
  app->add_flag("--graph", options.graph,
                "records passes of one shape in a CUDA graph and replays them (--storage ram)");
  app->footer(
      "Example:\n  block-streamer evaluate --model models/SmolLM2-135M-Instruct --data "
      "examples/data/genesis-held-out.txt --seq-len 256");
  app->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace block_streamer_cli
