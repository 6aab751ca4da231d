// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include <block_streamer/pipeline/activation_options.hpp>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace block_streamer_cli {

/// What every command that runs a model takes.
struct CommonOptions {
  std::filesystem::path model;
  std::string device;  ///< "cpu", "cuda", "cuda:N"; empty: CUDA when usable
  std::string storage = "auto";
  std::uint32_t prefetch_ahead = 1;
  std::uint64_t device_budget = 0;          ///< bytes
  std::optional<std::uint64_t> ram_budget;  ///< bytes; nullopt: what is available
  std::string dtype = "auto";
  std::string resident = "auto";
  bool verify_reads = false;
  block_streamer::ActivationOptions activations;  ///< of finetune
  std::filesystem::path trace;                    ///< empty: none
  std::filesystem::path stats;                    ///< empty: none
};

/// @brief For transform(): an option that takes a size such as 512MiB.
[[nodiscard]] CLI::Validator size_in_bytes();
/// @brief The same, but 0 is refused: of files.
[[nodiscard]] CLI::Validator file_size_in_bytes();
/// @brief For transform(): digits alone, with the bounds in the message. A minus sign would wrap
/// around, and zeros in front mean nothing.
[[nodiscard]] CLI::Validator whole_number(
    std::uint64_t least = 0, std::uint64_t most = std::numeric_limits<std::uint64_t>::max());
/// @brief For check(): a number that is no NaN and no infinity.
[[nodiscard]] std::string check_number(const std::string& text);
/// @brief A number above 0 that fp32 holds: no NaN, no infinity.
[[nodiscard]] std::string check_positive(const std::string& text);

void add_model_option(CLI::App& app, std::filesystem::path& model);
void add_common_options(CLI::App& app, CommonOptions& options);
/// @brief --adapter, which may be repeated.
void add_adapter_folders(CLI::App& app, std::vector<std::filesystem::path>& folders);
/// @throws UsageError if one folder is named twice.
void expect_distinct_adapters(const std::vector<std::filesystem::path>& folders);
/// @throws UsageError for options that cannot be meant together.
void expect_consistent(const CommonOptions& options);

}  // namespace block_streamer_cli
