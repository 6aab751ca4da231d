// SPDX-License-Identifier: Apache-2.0
#include "prompt_file.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/text/json_document.hpp>
#include <block_streamer/text/text_file.hpp>
#include <block_streamer/text/utf8.hpp>

#include <filesystem>
#include <iostream>
#include <iterator>
#include <string_view>
#include <utility>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

Prompt parse_row(std::string_view line, const std::string& place) {
  const nlohmann::json document = bs::parse_json(line, place);
  const bs::JsonObject object{document, place, "the row"};
  Prompt prompt;
  prompt.row = nlohmann::ordered_json::parse(line);
  if (object.find("messages") == nullptr) {
    if (object.find("prompt") == nullptr) object.fail(R"(has neither "prompt" nor "messages")");
    prompt.text = object.string("prompt");
    return prompt;
  }
  if (object.find("prompt") != nullptr) object.fail(R"(has both "prompt" and "messages")");
  for (const nlohmann::json& item : object.array("messages")) {
    const bs::JsonObject message{item, place,
                                 "messages[" + std::to_string(prompt.messages.size()) + "]"};
    prompt.messages.push_back({message.string("role"), message.string("content"), {}});
  }
  if (prompt.messages.empty()) object.fail("has no messages");
  return prompt;
}

}  // namespace

Prompt read_single_prompt(const std::string& file) {
  Prompt prompt;
  if (file == "-") {
    prompt.text.assign(std::istreambuf_iterator<char>{std::cin}, {});
  } else {
    prompt.text = bs::read_text_file(file);
  }
  if (prompt.text.ends_with('\n')) prompt.text.pop_back();
  return prompt;
}

std::vector<Prompt> read_prompts(const std::string& file) {
  const std::filesystem::path path = file;
  const bool rows = path.extension() == ".jsonl";
  std::string text = bs::read_text_file(path);
  bs::expect_utf8(text, file);
  constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
  if (text.starts_with(byte_order_mark)) text.erase(0, byte_order_mark.size());
  std::vector<Prompt> prompts;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = std::string_view{text}.substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
    if (rows) {
      prompts.push_back(parse_row(line, file + ", line " + std::to_string(number)));
    } else {
      prompts.push_back({std::string{line}, {}, {{"prompt", line}}, 0});
    }
    prompts.back().line = number;
  }
  if (prompts.empty())
    throw bs::FormatError{
        file, rows ? "there is no row in this file" : "every line of this file is empty"};
  return prompts;
}

}  // namespace block_streamer_cli
