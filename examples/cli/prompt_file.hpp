// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/chat_template.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <string>
#include <vector>

namespace block_streamer_cli {

/// One thing to continue.
struct Prompt {
  std::string text;
  std::vector<block_streamer::ChatMessage> messages;  ///< instead of a text
  nlohmann::ordered_json row;                         ///< what its line of an output begins with
  std::size_t line = 0;                               ///< of its file, from 1
};

/// @brief The whole file, or standard input for "-", as one prompt, without its last newline.
/// @throws StorageError if it cannot be read.
[[nodiscard]] Prompt read_single_prompt(const std::string& file);

/// @brief The prompts of a batch: lines of a .txt file that are not empty, or rows of a .jsonl file
/// with "prompt" or "messages".
/// @throws FormatError naming the line of a row that is neither, or the file if it has none.
[[nodiscard]] std::vector<Prompt> read_prompts(const std::string& file);

}  // namespace block_streamer_cli
