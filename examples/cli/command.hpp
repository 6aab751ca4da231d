// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace block_streamer_cli {

/// Runs what the command line asked for; returns the exit code. Errors are exceptions.
using Action = std::function<int()>;

// Each adds its subcommand to the program and sets `action` when that subcommand was parsed.
void add_generate_command(CLI::App& program, Action& action);
void add_finetune_command(CLI::App& program, Action& action);
void add_evaluate_command(CLI::App& program, Action& action);
void add_tokenize_command(CLI::App& program, Action& action);
void add_inspect_command(CLI::App& program, Action& action);
void add_convert_command(CLI::App& program, Action& action);
void add_checksum_command(CLI::App& program, Action& action);
void add_merge_command(CLI::App& program, Action& action);

}  // namespace block_streamer_cli
