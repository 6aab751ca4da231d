// SPDX-License-Identifier: Apache-2.0
#include "output_folder.hpp"

#include "console.hpp"
#include "model_files.hpp"
#include "saved_state.hpp"

#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/run_folder.hpp>
#include <block_streamer/finetune/saved_run.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>

namespace block_streamer_cli {

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

void take_up_dtype(CommonOptions& common, const FinetuneOptions& options) {
  if (!options.resume || common.dtype != "auto") return;
  const block_streamer::RunFolder folder{options.output};
  const auto saved = with_a_way_out([&] { return block_streamer::read_saved_run(folder.state()); });
  if (!saved) return;
  const auto found = saved->record.find("--dtype");
  if (found == saved->record.end()) return;
  common.dtype = found->second;
  say("dtype: " + common.dtype + " (auto: as the run in " + options.output.string() +
      " was begun)");
}

}  // namespace block_streamer_cli
