// SPDX-License-Identifier: Apache-2.0
// block-streamer: runs, finetunes and examines models whose blocks stay in storage.
#include "command.hpp"
#include "console.hpp"
#include "parse_fault.hpp"
#include "process_setup.hpp"
#include "usage_error.hpp"

#include <block_streamer/core/config.hpp>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string>

namespace {

namespace cli = block_streamer_cli;

constexpr int failed = 1;
constexpr int wrong_usage = 2;

int run(int argc, char** argv) {
  CLI::App program{
      "Runs and finetunes language models whose blocks stay in storage: a few are "
      "resident while the others stream."};
  program.name("block-streamer");
  program.set_version_flag(
      "--version", std::string{"block-streamer "} + std::string{block_streamer::version_string});
  program.require_subcommand(1);
  program.footer(
      "Exit codes: 0 done, 1 failed (a file, the model, the device, memory), 2 wrong usage, 130 "
      "interrupted.\nExample:\n  block-streamer generate --model models/SmolLM2-135M-Instruct "
      "--chat "
      "--prompt \"Name three rivers in Europe.\"");
  cli::Action action;
  cli::add_generate_command(program, action);
  cli::add_finetune_command(program, action);
  cli::add_evaluate_command(program, action);
  cli::add_tokenize_command(program, action);
  cli::add_inspect_command(program, action);
  cli::add_convert_command(program, action);
  cli::add_checksum_command(program, action);
  cli::add_merge_command(program, action);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      return program.exit(error);  // --help, --version
    }
    cli::say_error(cli::parse_fault(program, error) + " (--help lists the options)");
    return wrong_usage;
  }
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  cli::set_up_process();
  try {
    const int code = run(argc, argv);
    std::cout.flush();
    if (!std::cout) {
      cli::say_error("standard output: writing failed");
      return failed;
    }
    return code;
  } catch (const cli::UsageError& error) {
    cli::say_error(std::string{error.what()} + " (--help lists the options)");
    return wrong_usage;
  } catch (const std::bad_alloc&) {
    cli::say_error(
        "out of memory; --storage file and a smaller --batch, --seq-len or --dtype need "
        "less");
  } catch (const std::exception& error) {
    cli::say_error(error.what());
  } catch (...) {
    cli::say_error("an unknown failure");
  }
  return failed;
}
