// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/chat_template.hpp>
#include <block_streamer/text/text_file.hpp>
#include <block_streamer/text/text_row.hpp>
#include <block_streamer/text/tokenizer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

struct TextDatasetOptions {
  std::size_t seq_len = 512;  ///< longest row, in tokens; at least 2
  std::int32_t eos = -1;      ///< ends "text" and "completion" rows; needed for `.jsonl`
  /// Keep the last window of a `.txt` file even if it is short. It is always kept when there is no
  /// other.
  bool keep_short_window = false;
};

/// @brief Rows read from a `.txt` or `.jsonl` file, tokenized.
///
/// - `.txt`: the whole text, cut into consecutive windows of `seq_len` tokens.
/// - `.jsonl`, a line each: `{"text"}` (all trained), `{"prompt", "completion"}` (only the
///   completion trained; the two are encoded apart, as they are when a model continues a prompt),
///   `{"messages"}` (assistant turns trained). The first two end with a trained EOS.
///
/// **Threads.** Immutable once read. **Cost.** 5 bytes a token in memory.
class TextDataset {
 public:
  /// @param chat_template needed for rows with "messages"; may be null otherwise
  /// @throws FormatError naming the file and the line of a row that is not a JSON object with known
  /// fields, or the file if no row is left.
  /// @throws Utf8Error naming the byte offset in the file. @throws StorageError if it is
  /// unreadable.
  [[nodiscard]] static TextDataset open(const std::filesystem::path& path,
                                        const Tokenizer& tokenizer,
                                        const ChatTemplate* chat_template,
                                        const TextDatasetOptions& options) {
    expects(options.seq_len >= 2, "seq_len must be at least 2");
    const auto extension = path.extension();
    if (extension != ".txt" && extension != ".jsonl") {
      throw UnsupportedError{path.string() + ": data must be a .txt or a .jsonl file"};
    }
    const std::string text = read_text_file(path);
    expect_utf8(text, path.string());
    TextDataset data{path.string(), options};
    if (extension == ".txt") {
      data.cut(tokenizer.encode(text));
    } else {
      expects(tokenizer.vocabulary_size() > static_cast<std::size_t>(options.eos),
              "eos must be a token");
      data.read_lines(text, tokenizer, chat_template);
    }
    if (data.rows_.empty()) data.refuse_empty();
    return data;
  }

  [[nodiscard]] std::span<const TextRow> rows() const noexcept { return rows_; }
  /// @brief The rows, for good.
  [[nodiscard]] std::vector<TextRow> take_rows() && noexcept { return std::move(rows_); }
  /// @brief Rows that were longer than `seq_len` and lost their end, dropped ones included.
  [[nodiscard]] std::size_t truncated_rows() const noexcept { return truncated_; }
  /// @brief Rows left out because no token of them is trained (after truncation).
  [[nodiscard]] std::size_t dropped_rows() const noexcept { return dropped_; }

 private:
  TextDataset(std::string path, TextDatasetOptions options)
      : path_{std::move(path)}, options_{options} {}

  [[noreturn]] void refuse_empty() const {
    if (dropped_ != 0) {
      throw FormatError{path_, "none of its " + std::to_string(dropped_) +
                                   " rows has a token that is trained within the first " +
                                   std::to_string(options_.seq_len) + " tokens"};
    }
    const bool lines = std::filesystem::path{path_}.extension() == ".jsonl";
    throw FormatError{path_, lines
                                 ? "there is no row in this file"
                                 : "there is no text in this file (at least 2 tokens are needed)"};
  }

  void cut(const std::vector<std::int32_t>& ids) {
    for (std::size_t begin = 0; begin < ids.size(); begin += options_.seq_len) {
      const std::size_t size = std::min(options_.seq_len, ids.size() - begin);
      const bool keep = size == options_.seq_len || options_.keep_short_window || begin == 0;
      if (size < 2 || !keep) return;  // one token alone predicts nothing
      const auto first = ids.begin() + static_cast<std::ptrdiff_t>(begin);
      rows_.push_back(
          {{first, first + static_cast<std::ptrdiff_t>(size)}, std::vector<std::uint8_t>(size, 1)});
      rows_.back().trained[0] = 0;
    }
  }

  void read_lines(std::string_view text, const Tokenizer& tokenizer,
                  const ChatTemplate* chat_template) {
    EncodeScratch scratch;
    std::size_t number = 0;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      const std::string_view line = text.substr(begin, end - begin);
      ++number;
      if (line.find_first_not_of(" \t\r") != std::string_view::npos) {
        const std::string place = path_ + ", line " + std::to_string(number);
        const nlohmann::json document = parse_json(line, place);
        add(row_of(JsonObject{document, place, "the row"}, tokenizer, chat_template, scratch));
      }
      begin = end + 1;
    }
  }

  [[nodiscard]] TextRow row_of(const JsonObject& object, const Tokenizer& tokenizer,
                               const ChatTemplate* chat_template, EncodeScratch& scratch) const {
    const bool text = object.find("text") != nullptr;
    const bool messages = object.find("messages") != nullptr;
    const bool pair = object.find("prompt") != nullptr || object.find("completion") != nullptr;
    if (text + messages + pair != 1) {
      object.fail(R"(must have either "text", or "prompt" and "completion", or "messages")");
    }
    TextRow row;
    if (text) {
      append(row, tokenizer.encode(object.string("text"), true, scratch), true);
    } else if (pair) {
      append(row, tokenizer.encode(object.string("prompt"), true, scratch), false);
      append(row, tokenizer.encode(object.string("completion"), false, scratch), true);
    } else {
      if (chat_template == nullptr) object.fail("has \"messages\", but the model no chat template");
      const std::vector<ChatMessage> conversation = messages_of(object);
      try {
        return chat_template->encode_conversation(tokenizer, conversation, scratch);
      } catch (const UnsupportedError& error) {
        object.refuse(error.what());
      }
    }
    append(row, {options_.eos}, true);
    row.trained[0] = 0;
    return row;
  }

  static void append(TextRow& row, const std::vector<std::int32_t>& ids, bool trained) {
    row.tokens.insert(row.tokens.end(), ids.begin(), ids.end());
    row.trained.resize(row.tokens.size(), trained ? 1 : 0);
  }

  static std::vector<ChatMessage> messages_of(const JsonObject& row) {
    std::vector<ChatMessage> messages;
    for (const nlohmann::json& item : row.array("messages")) {
      const JsonObject message{item, row.path(),
                               "messages[" + std::to_string(messages.size()) + "]"};
      if (message.find("tool_calls") != nullptr) message.refuse("tool_calls are not supported");
      ChatMessage turn{message.string("role"), message.string("content"), {}};
      if (message.find("reasoning_content") != nullptr) {
        turn.reasoning = message.string("reasoning_content");
      }
      messages.push_back(std::move(turn));
    }
    if (messages.empty()) row.fail("has no messages");
    return messages;
  }

  void add(TextRow row) {
    if (row.tokens.size() > options_.seq_len) {
      row.tokens.resize(options_.seq_len);
      row.trained.resize(options_.seq_len);
      ++truncated_;
    }
    if (row.trained_count() == 0) {
      ++dropped_;
    } else {
      rows_.push_back(std::move(row));
    }
  }

  std::string path_;
  TextDatasetOptions options_;
  std::vector<TextRow> rows_;
  std::size_t truncated_ = 0, dropped_ = 0;
};

}  // namespace block_streamer::inline v1
