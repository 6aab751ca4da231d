// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model_runner.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// How much work took how long.
struct RunTotals {
  double seconds = 0;
  std::uint64_t tokens = 0;              ///< that went through the model, or came out of it
  std::optional<std::uint64_t> steps{};  ///< of training; 0 if the run was finished before
  std::uint64_t prompt_tokens = 0;       ///< of generation
  std::uint64_t prompts = 0;
  std::uint64_t bytes_needed = 0;  ///< in these seconds, as Statistics counts
  std::uint64_t bytes_read = 0;
};

/// @throws StorageError now rather than after the work, if no file can be made there.
void require_writable(const std::filesystem::path& file);
/// @throws StorageError now rather than after the model was loaded, if the file cannot be read.
void require_readable(const std::filesystem::path& file);
/// @throws UsageError naming the option if the file, by its name, holds no rows; empty names none.
void require_rows(const std::string& option, const std::filesystem::path& file);
/// @throws UsageError naming the options if two of these files, each with its option, are one;
/// empty names are none.
void require_distinct(const std::vector<std::pair<std::string, std::filesystem::path>>& files);
/// @brief The files that the common options name can be written, and would not replace what the
/// command works with.
/// @param used  files and folders besides --model that it reads or trains into, each with its
/// option; empty names are none. What lies in such a folder belongs to it.
/// @throws UsageError naming both options.
void require_writable(const CommonOptions& options,
                      std::vector<std::pair<std::string, std::filesystem::path>> used);
/// @brief The same of one more file.
/// @param own  the file, with its option.
void require_apart(const std::pair<std::string, std::filesystem::path>& own,
                   const std::vector<std::pair<std::string, std::filesystem::path>>& used);

/// @brief Writes --stats and --trace, whichever was asked for.
void write_reports(const CommonOptions& options, TrainingRunner& runner, const RunTotals& totals);

}  // namespace block_streamer_cli
