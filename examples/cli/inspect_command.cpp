// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "common_options.hpp"
#include "console.hpp"
#include "model_files.hpp"
#include "verify_weights.hpp"
#include "vocabulary.hpp"

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/architecture/model_summary.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/checkpoint/model_config.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

struct Command {
  std::filesystem::path model;
  bool json = false;
  bool verify = false;
};

struct Inspection {
  explicit Inspection(const std::filesystem::path& model)
      : folder{require_model_folder(model)},
        checkpoint{bs::Checkpoint::open(model)},
        config{bs::read_model_config(folder, warnings)},
        layout{bs::describe_model(config, checkpoint)},
        summary{bs::summarize(layout, checkpoint)} {
    warnings.insert(warnings.end(), checkpoint.warnings().begin(), checkpoint.warnings().end());
    warnings.insert(warnings.end(), layout.warnings.begin(), layout.warnings.end());
  }
  [[nodiscard]] std::vector<std::string> used_tensors() const {
    std::vector<std::string> names = layout.resident;
    for (const bs::BlockTensors& block : layout.blocks) {
      for (const std::string& name : block.names) names.push_back(block.prefix + name);
    }
    return names;
  }

  std::filesystem::path folder;
  std::vector<std::string> warnings;
  bs::Checkpoint checkpoint;
  bs::ModelConfig config;
  bs::ModelLayout layout;
  bs::ModelSummary summary;
};

/// Bytes that stay with each value of --resident, as stored.
struct ResidentBytes {
  explicit ResidentBytes(const Inspection& seen)
      : vocabulary{seen.layout, seen.checkpoint},
        all{seen.summary.resident.byte_count},
        head{all - (vocabulary.tied ? 0 : vocabulary.embedding_bytes)},
        none{head - vocabulary.head_bytes} {}
  Vocabulary vocabulary;
  std::uint64_t all;
  std::uint64_t head;
  std::uint64_t none;
};

nlohmann::ordered_json json_of(const bs::TensorTotals& totals) {
  return {{"tensors", totals.tensor_count},
          {"parameters", totals.parameter_count},
          {"bytes", totals.byte_count}};
}

nlohmann::ordered_json json_of(const WeightCheck& check) {
  nlohmann::ordered_json bad = nlohmann::ordered_json::array();
  for (const NonFiniteTensor& tensor : check.non_finite) {
    bad.push_back({{"tensor", tensor.name},
                   {"file", tensor.file},
                   {"count", tensor.count},
                   {"first_offset", tensor.first_offset}});
  }
  return {{"tensors", check.tensors}, {"bytes", check.bytes}, {"non_finite", bad}};
}

nlohmann::ordered_json json_of(const Inspection& seen, const std::optional<WeightCheck>& check,
                               const std::vector<std::string>& faults) {
  const bs::ModelSummary& summary = seen.summary;
  nlohmann::ordered_json out;
  out["model"] = seen.folder.string();
  out["model_type"] = summary.model_type;
  out["files"] = summary.file_count;
  out["block_count"] = summary.blocks.size();
  out["largest_block_bytes"] = summary.largest_block_byte_count;
  out["streamed"] = json_of(summary.streamed);
  out["resident"] = json_of(summary.resident);
  out["ignored"] = json_of(summary.ignored);
  for (const auto& [name, totals] : summary.by_dtype) out["dtypes"][name] = json_of(totals);
  out["blocks"] = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < summary.blocks.size(); ++i) {
    nlohmann::ordered_json block = json_of(summary.blocks[i]);
    block["name"] = seen.layout.blocks[i].prefix.substr(0, seen.layout.blocks[i].prefix.size() - 1);
    out["blocks"].push_back(std::move(block));
  }
  out["resident_tensors"] = seen.layout.resident;
  const ResidentBytes resident{seen};
  out["resident_with"] = {{"all", resident.all}, {"head", resident.head}, {"none", resident.none}};
  out["head_slices"] = {{"count", resident.vocabulary.slice_count},
                        {"bytes", resident.vocabulary.slice_bytes}};
  out["tied_head"] = summary.tied;
  out["vocabulary"] = seen.config.vocabulary_size;
  out["positions"] = seen.config.max_position;
  out["eos_ids"] = seen.config.eos_ids;
  out["warnings"] = seen.warnings;
  if (const bs::ShardManifest* manifest = seen.checkpoint.manifest()) {
    out["checksums"]["layout"] =
        manifest->layout == bs::ShardLayout::packed ? "packed" : "original";
    if (check) out["checksums"]["faults"] = faults;
  }
  if (check) out["verified"] = json_of(*check);
  return out;
}

void print_totals(const std::string& name, const bs::TensorTotals& totals,
                  const std::string& more) {
  std::cout << name << readable_bytes(totals.byte_count) << ", " << totals.parameter_count
            << " parameters in " << totals.tensor_count << " tensors" << more << '\n';
}

void print_blocks(const Inspection& seen) {
  const auto& blocks = seen.summary.blocks;
  for (std::size_t begin = 0; begin < blocks.size();) {
    std::size_t end = begin + 1;
    while (end < blocks.size() && blocks[end] == blocks[begin]) ++end;
    const auto name = [&](std::size_t i) {
      const std::string& prefix = seen.layout.blocks[i].prefix;
      return prefix.substr(0, prefix.size() - 1);
    };
    std::cout << "  " << name(begin) << (end - begin > 1 ? " … " + name(end - 1) : "") << ": "
              << end - begin << " × " << readable_bytes(blocks[begin].byte_count) << '\n';
    begin = end;
  }
}

void print_resident_choices(const Inspection& seen) {
  const ResidentBytes bytes{seen};
  if (!bytes.vocabulary.tied) {
    std::cout << "  --resident head keeps " << readable_bytes(bytes.head)
              << ": rows of the embedding are read from its file\n";
  }
  std::cout << "  --resident none keeps " << readable_bytes(bytes.none) << ": "
            << bytes.vocabulary.words() << '\n';
}

void print(const Inspection& seen) {
  const bs::ModelSummary& summary = seen.summary;
  std::cout << seen.folder.string() << ": " << summary.model_type << ", " << summary.blocks.size()
            << " blocks in " << summary.file_count << (summary.file_count == 1 ? " file" : " files")
            << '\n';
  print_totals("streams   ", summary.streamed, "");
  print_blocks(seen);
  print_totals("resident  ", summary.resident, "");
  for (const std::string& name : seen.layout.resident) {
    const bs::TensorSpec& spec = seen.checkpoint.at(name).spec;
    std::cout << "  " << name << " " << bs::to_string(spec.shape) << " " << bs::name_of(spec.dtype)
              << (summary.tied && name == seen.layout.embedding ? ", also the head" : "") << '\n';
  }
  print_resident_choices(seen);
  if (summary.ignored.tensor_count != 0) print_totals("ignored   ", summary.ignored, "");
  for (const auto& [name, totals] : summary.by_dtype) {
    print_totals("stored as " + name + ": ", totals, "");
  }
  std::cout
      << "two blocks take " << readable_bytes(2 * summary.largest_block_byte_count)
      << " (--prefetch-ahead 1, in the stored type); conversion at each visit takes one more, "
      << readable_bytes(4 * largest_parameter_count(summary)) << " for fp32\n";
}

void print(const WeightCheck& check) {
  for (const NonFiniteTensor& tensor : check.non_finite) {
    std::cout << tensor.file << ", offset " << tensor.first_offset << ", tensor " << tensor.name
              << ": " << tensor.count << " values are not finite, this is the first\n";
  }
  std::cout << "verified  " << readable_bytes(check.bytes) << " in " << check.tensors
            << " tensors, " << (check.non_finite.empty() ? "all finite" : "not all finite") << '\n';
}

/// One line for each file or block that is not as it was summed.
std::vector<std::string> compare_checksums(const Inspection& seen) {
  const bs::ShardManifest* manifest = seen.checkpoint.manifest();
  if (manifest == nullptr) return {};
  Progress progress{"MiB", 0};
  std::uint64_t bytes = 0;
  return bs::verify_manifest(seen.checkpoint.folder(), *manifest, [&](std::uint64_t more) {
    bytes += more;
    progress.update(bytes >> 20U, "checksums");
  });
}

int run(const Command& command) {
  const Inspection seen{command.model};
  std::optional<WeightCheck> check;
  std::vector<std::string> faults;
  if (command.verify) {
    faults = compare_checksums(seen);
    check = verify_weights(seen.checkpoint, seen.used_tensors());
  }
  if (command.json) {
    std::cout << json_of(seen, check, faults).dump(2) << '\n';
  } else {
    for (const std::string& warning : seen.warnings) say("warning: " + warning);
    print(seen);
    if (check) print(*check);
    for (const std::string& fault : faults) std::cout << fault << '\n';
    if (check && seen.checkpoint.manifest() != nullptr && faults.empty()) {
      std::cout << "checksums all as they were\n";
    }
  }
  if (!faults.empty()) {
    say_error(std::to_string(faults.size()) + " checksums differ, the first: " + faults.front());
    return 1;
  }
  if (!check || check->non_finite.empty()) return 0;
  say_error(std::to_string(check->non_finite.size()) + " tensors hold values that are not finite");
  return 1;
}

}  // namespace

void add_inspect_command(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand(
      "inspect", "Shows what of a model would stream and what would stay resident");
  add_model_option(*app, command->model);
  app->add_flag("--json", command->json, "as JSON");
  app->add_flag(
      "--verify", command->verify,
      "read all weights: compare their checksums where there are any, look for values that are not "
      "finite");
  app->footer("Example:\n  block-streamer inspect --model models/SmolLM2-135M-Instruct --verify");
  app->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace block_streamer_cli
