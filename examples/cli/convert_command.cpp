// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "common_options.hpp"
#include "console.hpp"
#include "interrupt.hpp"
#include "model_files.hpp"

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/checkpoint/shard_conversion.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

struct Command {
  std::filesystem::path model;
  std::filesystem::path output;
  std::string dtype = "keep";
  std::uint64_t shard_byte_count = bs::ShardOptions{}.shard_byte_count;
  bool overwrite = false;
};

struct Interrupted {};

bs::ShardOptions shard_options(const Command& command) {
  bs::ShardOptions options;
  options.shard_byte_count = command.shard_byte_count;
  if (command.dtype == "bf16") options.dtype = bs::DType::bf16;
  if (command.dtype == "fp16") options.dtype = bs::DType::f16;
  if (command.dtype == "fp32") options.dtype = bs::DType::f32;
  return options;
}

void report(const Command& command, const bs::ConversionReport& done, double seconds) {
  std::string text = command.output.string() + ": " + readable_bytes(done.byte_count) + " in " +
                     counted(done.manifest.files.size(), "file");
  if (done.files_kept != 0) {
    text += ", " + std::to_string(done.files_kept) + " of them complete from an earlier run";
  }
  say(text + ", " + std::to_string(done.manifest.blocks.size()) + " blocks, " +
      readable_duration(seconds) + " (" +
      readable_number(static_cast<double>(done.byte_count) / 1e9 / seconds, 2) + " GB/s)");
}

int run(const Command& command) {
  const auto folder = require_model_folder(command.model);
  const bs::Checkpoint checkpoint = bs::Checkpoint::open(command.model);
  std::vector<std::string> warnings;
  const bs::ModelConfig config = bs::read_model_config(folder, warnings);
  const bs::ModelLayout layout = bs::describe_model(config, checkpoint);
  for (const auto& list : {std::span<const std::string>{warnings}, checkpoint.warnings(),
                           std::span<const std::string>{layout.warnings}}) {
    for (const std::string& warning : list) say("warning: " + warning);
  }
  catch_interrupts();
  const auto started = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  };
  std::unique_ptr<Progress> progress;
  const bs::ConversionOptions options{
      command.overwrite, [&](std::uint64_t bytes, std::uint64_t all) {
        if (interrupted()) throw Interrupted{};
        if (!progress) progress = std::make_unique<Progress>("MiB", all >> 20U);
        progress->update(
            bytes >> 20U,
            readable_number(static_cast<double>(bytes) / 1e9 / seconds(), 2) + " GB/s");
      }};
  try {
    const bs::ConversionReport done =
        bs::convert_to_shards(checkpoint, layout.blocks, layout.resident, command.output,
                              shard_options(command), options);
    progress.reset();
    report(command, done, seconds());
    return 0;
  } catch (const Interrupted&) {
    progress.reset();
    say("interrupted; the same command goes on where this one stopped");
    return interrupted_exit_code;
  }
}

}  // namespace

void add_convert_command(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand(
      "convert",
      "Packs a model into files that any tier reads without over-read, with checksums. Streaming "
      "never needs it. Stopped or killed, it goes on when run again");
  add_model_option(*app, command->model);
  app->add_option("--output", command->output, "folder for the packed model")
      ->required()
      ->type_name("DIR");
  app->add_option("--dtype", command->dtype, "what weights are stored in: keep, bf16, fp16, fp32")
      ->check(CLI::IsMember({"keep", "bf16", "fp16", "fp32"}))
      ->type_name("TYPE")
      ->capture_default_str();
  app->add_option("--shard-size", command->shard_byte_count,
                  "largest file, unless one block is larger, e.g. 2GiB (default: 4GiB)")
      ->transform(file_size_in_bytes())
      ->type_name("BYTES");
  app->add_flag("--overwrite", command->overwrite, "replace an earlier conversion in that folder");
  app->footer(
      "Example:\n  block-streamer convert --model models/SmolLM2-135M-Instruct --output "
      "models/SmolLM2-packed");
  app->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace block_streamer_cli
