// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "common_options.hpp"
#include "console.hpp"
#include "interrupt.hpp"
#include "merge_job.hpp"
#include "model_files.hpp"

#include <chrono>
#include <memory>
#include <string>

namespace block_streamer_cli {
namespace {

struct Interrupted {};

int run(MergeJob job) {
  job.model = require_model_folder(job.model);
  catch_interrupts();
  const auto started = std::chrono::steady_clock::now();
  const auto rate = [&](std::uint64_t bytes) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - started;
    return readable_number(static_cast<double>(bytes) / 1e9 / passed.count(), 2) + " GB/s";
  };
  std::unique_ptr<Progress> progress;
  job.progress = [&](std::uint64_t bytes, std::uint64_t all) {
    if (interrupted()) throw Interrupted{};
    if (!progress) progress = std::make_unique<Progress>("MiB", all >> 20U);
    progress->update(bytes >> 20U, rate(bytes));
  };
  try {
    const MergeSummary done = run_merge(job);
    progress.reset();
    say(job.output.string() + ": the adapter is in " + counted(done.merged, "tensor") + ", " +
        std::to_string(done.kept) + " are as they were; " + readable_bytes(done.byte_count) +
        " in " + counted(done.files, "file") + ", " + rate(done.byte_count));
    return 0;
  } catch (const Interrupted&) {
    progress.reset();
    say("interrupted; nothing is written");
    return interrupted_exit_code;
  }
}

}  // namespace

void add_merge_command(CLI::App& program, Action& action) {
  auto job = std::make_shared<MergeJob>();
  CLI::App* app = program.add_subcommand(
      "merge", "Writes a model with an adapter added to its weights, as a folder like the model's");
  add_model_option(*app, job->model);
  app->add_option("--adapter", job->adapter, "a LoRA adapter in PEFT's format")
      ->required()
      ->type_name("DIR");
  app->add_option("--output", job->output, "folder for the merged model; new or empty")
      ->required()
      ->type_name("DIR");
  app->add_option("--shard-size", job->shard_byte_count,
                  "largest file of weights, unless one tensor is larger (default: 5GB)")
      ->transform(file_size_in_bytes())
      ->type_name("BYTES");
  app->footer(
      "Example:\n  block-streamer merge --model models/SmolLM2-135M-Instruct --adapter "
      "adapters/genesis --output models/SmolLM2-genesis");
  app->callback([job, &action] { action = [job] { return run(*job); }; });
}

}  // namespace block_streamer_cli
