// SPDX-License-Identifier: Apache-2.0
#include "run_report.hpp"
#include "usage_error.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <nlohmann/json.hpp>

#include <cerrno>
#include <system_error>

#include <unistd.h>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

[[nodiscard]] double per_second(std::uint64_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

[[nodiscard]] nlohmann::ordered_json json_of(const bs::Statistics& statistics) {
  nlohmann::ordered_json out;
  bs::for_each_statistic(
      statistics, [&](std::string_view name, auto value) { out[std::string{name}] = value; });
  return out;
}

[[nodiscard]] nlohmann::ordered_json json_of(const MemoryPeak& peak) {
  const auto number = [](const std::optional<std::uint64_t>& bytes) {
    return bytes ? nlohmann::ordered_json(*bytes) : nlohmann::ordered_json();
  };
  return {{"predicted", number(peak.predicted)}, {"measured", number(peak.measured)}};
}

[[nodiscard]] std::string statistics_json(const bs::Statistics& statistics,
                                          const VocabularyReport& vocabulary,
                                          const MemoryReport& memory, const RunTotals& totals) {
  nlohmann::ordered_json out = json_of(statistics);
  if (vocabulary.head) out["head"] = json_of(*vocabulary.head);
  if (vocabulary.embedding) {
    out["embedding"] = {{"rows_read", vocabulary.embedding->rows},
                        {"bytes_read", vocabulary.embedding->bytes}};
  }
  if (memory.device) out["memory"]["device"] = json_of(*memory.device);
  if (memory.page_locked) out["memory"]["page_locked"] = json_of(*memory.page_locked);
  out["memory"]["rss"] = json_of(memory.rss);
  out["seconds"] = totals.seconds;
  out["tokens"] = totals.tokens;
  if (totals.steps) out["steps"] = *totals.steps;
  if (totals.prompts != 0) out["prompts"] = totals.prompts;
  if (totals.prompt_tokens != 0) out["prompt_tokens"] = totals.prompt_tokens;
  out["tokens_per_s"] = per_second(totals.tokens, totals.seconds);
  out["bytes_needed_per_s"] = per_second(totals.bytes_needed, totals.seconds);
  out["bytes_read_per_s"] = per_second(totals.bytes_read, totals.seconds);
  return out.dump(2) + "\n";
}

std::filesystem::path real_path(const std::filesystem::path& file) {
  std::error_code error;
  const auto real =
      std::filesystem::weakly_canonical(std::filesystem::absolute(file, error), error);
  return real.has_filename() ? real : real.parent_path();  // "folder/" is the folder
}

}  // namespace

void require_writable(const std::filesystem::path& file) {
  if (file.empty()) return;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) {
    throw bs::StorageError{file.string(), "is a folder, a file is to be written"};
  }
  if (std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error)) {
    throw bs::StorageError{file.string(), "is no regular file: it is not replaced"};
  }
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  // The file is written beside its place and moved there, so it is the folder that counts.
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw bs::StorageError{file.string(), "cannot be written", {errno, std::generic_category()}};
  }
}

void require_readable(const std::filesystem::path& file) {
  if (file.empty() || ::access(file.c_str(), R_OK) == 0) return;
  throw bs::StorageError{file.string(), "cannot be read", {errno, std::generic_category()}};
}

void require_rows(const std::string& option, const std::filesystem::path& file) {
  const std::filesystem::path kind = file.extension();
  if (file.empty() || kind == ".txt" || kind == ".jsonl") return;
  throw UsageError{option + " " + file.string() + ": rows are read from a .txt or a .jsonl file"};
}

void require_writable(const CommonOptions& options,
                      std::vector<std::pair<std::string, std::filesystem::path>> used) {
  require_writable(options.stats);
  require_writable(options.trace);
  require_distinct({{"--stats", options.stats}, {"--trace", options.trace}});
  used.emplace_back("--model", options.model);
  require_apart({"--stats", options.stats}, used);
  require_apart({"--trace", options.trace}, used);
}

void require_apart(const std::pair<std::string, std::filesystem::path>& own,
                   const std::vector<std::pair<std::string, std::filesystem::path>>& used) {
  if (own.second.empty()) return;
  const std::filesystem::path file = real_path(own.second);
  for (const auto& [option, path] : used) {
    if (path.empty()) continue;
    const std::filesystem::path real = real_path(path);
    const bool inside = file.parent_path() == real;
    if (!inside && file != real) continue;
    throw UsageError{own.first + " " + own.second.string() +
                     (inside ? " would lie in the folder of " : " would replace that of ") +
                     option + ": name another place"};
  }
}

void require_distinct(const std::vector<std::pair<std::string, std::filesystem::path>>& files) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (files[i].second.empty() || files[j].second.empty()) continue;
      if (real_path(files[i].second) != real_path(files[j].second)) continue;
      throw UsageError{files[j].first + " and " + files[i].first +
                       " name one file: " + files[i].second.string()};
    }
  }
}

void write_reports(const CommonOptions& options, TrainingRunner& runner, const RunTotals& totals) {
  if (!options.stats.empty()) {
    bs::atomic_replace(options.stats, statistics_json(runner.statistics(), runner.vocabulary(),
                                                      runner.memory(), totals));
  }
  runner.write_trace();
}

}  // namespace block_streamer_cli
