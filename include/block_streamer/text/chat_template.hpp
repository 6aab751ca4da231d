// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/json_document.hpp>
#include <block_streamer/text/known_templates.hpp>
#include <block_streamer/text/text_row.hpp>
#include <block_streamer/text/tokenizer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// One turn of a conversation.
struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
  std::optional<std::string> reasoning;  ///< of an assistant, where the template shows it
};

struct PromptOptions {
  bool add_generation_prompt = true;
  /// Only for templates that know it; not set: the template's own default.
  std::optional<bool> enable_thinking;
};

/// @brief A model's chat template. Known templates are recognized by what they say, and rendered as
/// they would be; there is no template language here, so any other template is refused.
///
/// **Threads.** Const use from several threads.
class ChatTemplate {
 public:
  /// @param text the template
  /// @param path of the file it comes from, for messages
  /// @throws UnsupportedError naming the file and the template's first line if it is not known.
  ChatTemplate(std::string_view text, std::string path) : path_{std::move(path)} {
    auto style = recognize_template(text);
    if (!style) {
      const std::string_view line = text.substr(0, std::min<std::size_t>(text.find('\n'), 100));
      throw UnsupportedError{path_ + ": unknown chat template, beginning with \"" +
                             std::string{line} + "\""};
    }
    style_ = std::move(*style);
  }

  /// @brief Reads `chat_template.jinja` of a model folder, else the one in `tokenizer_config.json`.
  /// @throws FormatError if neither has a template.
  [[nodiscard]] static ChatTemplate open(const std::filesystem::path& folder) {
    const auto file = folder / "chat_template.jinja";
    if (std::filesystem::exists(file)) return {read_text_file(file, size_limit), file.string()};
    const auto config = folder / "tokenizer_config.json";
    if (!std::filesystem::exists(config)) {
      throw FormatError{folder.string(),
                        "has neither chat_template.jinja nor tokenizer_config.json"};
    }
    const std::string file_text = read_text_file(config, size_limit);
    const auto document = parse_json(std::string_view{file_text}, config.string());
    return {JsonObject{document, config.string(), "tokenizer_config"}.string("chat_template"),
            config.string()};
  }

  [[nodiscard]] const TemplateStyle& style() const noexcept { return style_; }

  /// @brief The conversation as text.
  /// @throws UnsupportedError naming a role other than system, user and assistant, or
  /// enable_thinking where the template does not know it.
  /// @pre there is a message
  [[nodiscard]] std::string render(std::span<const ChatMessage> messages,
                                   const PromptOptions& options = {}) const {
    std::string text;
    for (const Turn& turn : turns_of(messages)) text += turn.head + turn.body;
    if (options.enable_thinking && !style_.can_disable_thinking) {
      throw UnsupportedError{path_ + ": this chat template does not know enable_thinking"};
    }
    if (!options.add_generation_prompt) return text;
    text += "<|im_start|>assistant\n" + style_.prompt_suffix;
    if (options.enable_thinking == false) text += "<think>\n\n</think>\n\n";
    return text;
  }

  /// @brief The ids of a prompt: `render`, encoded without the tokenizer's own special tokens.
  [[nodiscard]] std::vector<std::int32_t> encode_prompt(const Tokenizer& tokenizer,
                                                        std::span<const ChatMessage> messages,
                                                        const PromptOptions& options = {}) const {
    return tokenizer.encode(render(messages, options), false);
  }

  /// @brief The ids of a whole conversation for training. Trained is what the model writes when it
  /// is asked: of each assistant turn all that follows "<|im_start|>assistant\n" (a <think> block
  /// of the template included) up to and with <|im_end|>.
  /// @throws UnsupportedError if <|im_start|> and <|im_end|> are not added tokens of `tokenizer`.
  /// **Cost.** Encodes each assistant turn's head twice.
  [[nodiscard]] TextRow encode_conversation(const Tokenizer& tokenizer,
                                            std::span<const ChatMessage> messages,
                                            EncodeScratch& scratch) const {
    const std::int32_t end_id = marker(tokenizer, "<|im_end|>");
    marker(tokenizer, "<|im_start|>");
    TextRow row;
    for (const Turn& turn : turns_of(messages)) {
      // The markers cut the text, so turns can be encoded one by one.
      const auto ids = tokenizer.encode(turn.head + turn.body, false, scratch);
      std::size_t begin = ids.size(), end = ids.size();
      if (turn.is_assistant) {
        const auto head = tokenizer.encode(turn.head, false, scratch);
        begin = static_cast<std::size_t>(
            std::mismatch(head.begin(), head.end(), ids.begin(), ids.end()).first - head.begin());
        end = static_cast<std::size_t>(std::find(ids.rbegin(), ids.rend(), end_id).base() -
                                       ids.begin());
      }
      for (std::size_t i = 0; i < ids.size(); ++i) row.trained.push_back(i >= begin && i < end);
      row.tokens.insert(row.tokens.end(), ids.begin(), ids.end());
    }
    if (!row.trained.empty()) row.trained[0] = 0;
    return row;
  }

  /// @copydoc encode_conversation
  [[nodiscard]] TextRow encode_conversation(const Tokenizer& tokenizer,
                                            std::span<const ChatMessage> messages) const {
    EncodeScratch scratch;
    return encode_conversation(tokenizer, messages, scratch);
  }

 private:
  static constexpr std::uint64_t size_limit = std::uint64_t{1} << 26U;

  struct Turn {
    std::string head;  ///< "<|im_start|>role\n"
    std::string body;  ///< the rest
    bool is_assistant;
  };

  static Turn plain(const std::string& role, std::string_view content) {
    return {"<|im_start|>" + role + "\n", std::string{content} + "<|im_end|>\n",
            role == "assistant"};
  }

  [[nodiscard]] std::vector<Turn> turns_of(std::span<const ChatMessage> messages) const {
    expects(!messages.empty(), "a conversation must have a message");
    std::vector<Turn> turns;
    if (style_.default_system && messages[0].role != "system") {
      turns.push_back(plain("system", *style_.default_system));
    }
    const std::size_t query = last_query(messages);
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const ChatMessage& message = messages[i];
      const bool assistant = message.role == "assistant";
      if (!assistant && message.role != "user" && message.role != "system") {
        throw UnsupportedError{path_ + ": message " + std::to_string(i) + " has the role \"" +
                               message.role + "\"; only system, user and assistant are supported"};
      }
      turns.push_back(assistant && style_.thinks
                          ? thinking_turn(message, i > query, i + 1 == messages.size())
                          : plain(message.role, message.content));
    }
    return turns;
  }

  /// The last user message that is not a tool's answer; without one, the last message.
  static std::size_t last_query(std::span<const ChatMessage> messages) {
    for (std::size_t i = messages.size(); i-- > 0;) {
      const std::string& text = messages[i].content;
      const bool answer = text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
      if (messages[i].role == "user" && !answer) return i;
    }
    return messages.size() - 1;
  }

  static Turn thinking_turn(const ChatMessage& message, bool after_query, bool last) {
    constexpr std::string_view close = "</think>";
    std::string_view content = message.content, reasoning;
    if (message.reasoning) {
      reasoning = *message.reasoning;
    } else if (content.find(close) != std::string_view::npos) {
      reasoning = content.substr(0, content.find(close));
      while (reasoning.ends_with('\n')) reasoning.remove_suffix(1);
      const std::size_t open = reasoning.rfind("<think>");
      if (open != std::string_view::npos) reasoning.remove_prefix(open + 7);
      reasoning = without_leading_newlines(reasoning);
      content = without_leading_newlines(content.substr(content.rfind(close) + close.size()));
    }
    if (!after_query || !(last || !reasoning.empty())) return plain("assistant", content);
    reasoning = without_leading_newlines(reasoning);
    while (reasoning.ends_with('\n')) reasoning.remove_suffix(1);
    return plain("assistant", "<think>\n" + std::string{reasoning} + "\n</think>\n\n" +
                                  std::string{without_leading_newlines(content)});
  }

  static std::string_view without_leading_newlines(std::string_view text) {
    while (text.starts_with('\n')) text.remove_prefix(1);
    return text;
  }

  std::int32_t marker(const Tokenizer& tokenizer, std::string_view token) const {
    const auto id = tokenizer.token_id(token);
    if (id && tokenizer.is_added(*id)) return *id;
    throw UnsupportedError{path_ + ": the template writes " + std::string{token} +
                           ", which is not an added token of " + tokenizer.path()};
  }

  std::string path_;
  TemplateStyle style_;
};

}  // namespace block_streamer::inline v1
