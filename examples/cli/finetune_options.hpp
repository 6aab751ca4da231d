// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common_options.hpp"
#include "jobs.hpp"

namespace block_streamer_cli {

/// @brief The options of `finetune`, those of every command included. Both stay where they are
/// until the command line was read.
void add_finetune_options(CLI::App& app, CommonOptions& common, FinetuneOptions& options);

}  // namespace block_streamer_cli
