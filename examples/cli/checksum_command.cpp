// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "common_options.hpp"
#include "console.hpp"
#include "model_files.hpp"

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/checkpoint/shard_manifest_writer.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <memory>
#include <string>
#include <vector>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

int run(const std::filesystem::path& model) {
  const auto folder = require_model_folder(model);
  const bs::Checkpoint checkpoint = bs::Checkpoint::open(model);
  if (checkpoint.manifest() != nullptr &&
      checkpoint.manifest()->layout == bs::ShardLayout::packed) {
    throw bs::Error{folder.string() +
                    ": a packed model has its checksums already; inspect --verify compares them"};
  }
  std::vector<std::string> warnings;
  const bs::ModelConfig config = bs::read_model_config(folder, warnings);
  const bs::ModelLayout layout = bs::describe_model(config, checkpoint);
  Progress progress{"MiB", 0};
  std::uint64_t bytes = 0;
  const bs::ShardManifest manifest =
      bs::sum_checkpoint(checkpoint, layout.blocks, layout.resident, [&](std::uint64_t more) {
        bytes += more;
        progress.update(bytes >> 20U, readable_bytes(bytes));
      });
  progress.finish();
  const std::filesystem::path path = checkpoint.folder() / bs::manifest_file_name;
  bs::atomic_replace(path, std::string_view{bs::format_shard_manifest(manifest)});
  say(path.string() + ": checksums of " + std::to_string(manifest.blocks.size()) + " blocks and " +
      std::to_string(manifest.resident.size()) + " resident tensors, " + readable_bytes(bytes));
  return 0;
}

}  // namespace

void add_checksum_command(CLI::App& program, Action& action) {
  auto model = std::make_shared<std::filesystem::path>();
  CLI::App* app = program.add_subcommand(
      "checksum",
      "Writes checksums beside a model's weights, for inspect --verify and --verify-reads");
  add_model_option(*app, *model);
  app->footer("Example:\n  block-streamer checksum --model models/SmolLM2-135M-Instruct");
  app->callback([model, &action] { action = [model] { return run(*model); }; });
}

}  // namespace block_streamer_cli
