// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace block_streamer_cli {

/// @brief What is wrong with a command line that could not be parsed. A word that is no command or
/// option is named first, with the one that it is nearest to: what else is missing follows from it.
/// @param program  after parse() threw `error`.
[[nodiscard]] std::string parse_fault(const CLI::App& program, const CLI::ParseError& error);

}  // namespace block_streamer_cli
