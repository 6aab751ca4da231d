// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "common_options.hpp"
#include "model_files.hpp"
#include "usage_error.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/text/json_document.hpp>
#include <block_streamer/text/text_file.hpp>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

struct Command {
  std::filesystem::path model;
  std::optional<std::string> text;
  std::string file;
  bool decode = false;
};

/// Nothing is cut off: ids stand for every byte.
std::string read_input(const Command& command) {
  if (command.text) return *command.text;
  if (command.file != "-") {
    std::error_code ignored;
    if (!std::filesystem::exists(command.file, ignored)) {
      throw bs::StorageError{command.file, "no such file; a text itself is given with --text"};
    }
    return bs::read_text_file(command.file);
  }
  return {std::istreambuf_iterator<char>{std::cin}, {}};
}

std::vector<std::int32_t> parse_ids(const std::string& text) {
  const std::string place = "the ids to decode";
  const nlohmann::json document = bs::parse_json(std::string_view{text}, place);
  if (!document.is_array()) throw bs::FormatError{place, "must be a JSON array"};
  std::vector<std::int32_t> ids;
  for (const nlohmann::json& id : document) {
    if (!id.is_number_unsigned() ||
        id.get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max()) {
      throw bs::FormatError{place, "entry " + std::to_string(ids.size()) + " is no id"};
    }
    ids.push_back(id.get<std::int32_t>());
  }
  return ids;
}

int run(const Command& command) {
  if (!command.text && command.file.empty()) {
    throw UsageError{"tokenize needs --text TEXT, --file FILE, or - for standard input"};
  }
  const ModelText model{command.model};
  const std::string input = read_input(command);
  if (command.decode) {
    std::cout << model.tokenizer().decode(parse_ids(input), /*skip_special_tokens=*/false);
  } else {
    std::cout << nlohmann::json(model.tokenizer().encode(input)).dump() << '\n';
  }
  return 0;
}

}  // namespace

void add_tokenize_command(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand(
      "tokenize", "Prints the ids of a text as a JSON array, or the text of ids");
  add_model_option(*app, command->model);
  auto* text = app->add_option("--text", command->text, "the text, or the ids with --decode")
                   ->type_name("TEXT");
  app->add_option("--file,file", command->file,
                  "a file with the text, not the text itself; - is standard input")
      ->type_name("FILE")
      ->excludes(text);
  app->add_flag("--decode", command->decode, "from ids to text, special tokens included");
  app->footer(
      "Example:\n  block-streamer tokenize --model models/SmolLM2-135M-Instruct --text \"Hello "
      "world\"");
  app->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace block_streamer_cli
