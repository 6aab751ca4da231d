// SPDX-License-Identifier: Apache-2.0
#include "parse_fault.hpp"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer_cli {
namespace {

/// How many letters have to be put in, left out or replaced.
std::size_t distance(std::string_view from, std::string_view to) {
  std::vector<std::size_t> row(to.size() + 1);
  for (std::size_t j = 0; j < row.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::size_t before = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < to.size(); ++j) {
      const std::size_t replaced = before + (from[i] == to[j] ? 0 : 1);
      before = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, replaced});
    }
  }
  return row.back();
}

/// "; did you mean X?", or nothing if none is near.
std::string suggestion(const std::string& given, const std::vector<std::string>& known) {
  std::string nearest;
  std::size_t least = given.size() / 3 + 1;  // more letters differ in what is meant otherwise
  for (const std::string& name : known) {
    const bool begun = given.size() > 3 && name.starts_with(given);
    const std::size_t letters = begun ? 0 : distance(given, name);
    if (letters > least || (letters == least && !nearest.empty())) continue;
    least = letters;
    nearest = name;
  }
  return nearest.empty() ? std::string{} : "; did you mean " + nearest + "?";
}

std::vector<std::string> commands_of(const CLI::App& program) {
  std::vector<std::string> names;
  for (const CLI::App* command : program.get_subcommands(nullptr)) {
    names.push_back(command->get_name());
  }
  return names;
}

std::vector<std::string> options_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::string all(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool is_option(const std::string& word) {
  return word.size() > 1 && word.starts_with('-');
}

/// The first of the words that nothing takes; an option before a value, which may be its own.
std::string first_unknown(const std::vector<std::string>& words) {
  const auto option = std::find_if(words.begin(), words.end(), is_option);
  return option == words.end() ? words.front() : *option;
}

/// Of `app`, which is a command or the program itself.
std::string unknown_word(const CLI::App& app, const std::string& word) {
  if (!is_option(word)) {
    return "'" + word + "' belongs to no option of " + app.get_name() +
           "; a value with spaces needs quotes";
  }
  const std::string option = word.substr(0, word.find('='));
  return option + " is no option of " + app.get_name() + suggestion(option, options_of(app));
}

/// CLI11's words for an option that may come once and came more often; other texts as they are.
std::string given_once(const std::string& text) {
  const std::size_t at = text.find(": At Most 1 required");
  return at == std::string::npos ? text : text.substr(0, at) + " is given more than once";
}

}  // namespace

std::string parse_fault(const CLI::App& program, const CLI::ParseError& error) {
  const bool incomplete = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr ||
                          dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  if (!incomplete) return given_once(error.what());
  const std::vector<CLI::App*> given = program.get_subcommands();
  const std::vector<std::string> before = program.remaining();
  if (given.empty()) {
    const std::vector<std::string> known = commands_of(program);
    if (before.empty()) return "a command is needed: " + all(known);
    if (is_option(before.front()))
      return before.front() + " needs a command before it: " + all(known);
    return "'" + before.front() + "' is no command (" + all(known) + ")" +
           suggestion(before.front(), known);
  }
  if (!before.empty()) return unknown_word(program, first_unknown(before));
  const std::vector<std::string> after = given.front()->remaining();
  return after.empty() ? error.what() : unknown_word(*given.front(), first_unknown(after));
}

}  // namespace block_streamer_cli
