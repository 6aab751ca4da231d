// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/byte_alphabet.hpp>
#include <block_streamer/text/regex.hpp>

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace block_streamer::inline v1 {

/// Joins all tokens and reads their characters as bytes of the byte alphabet.
struct ByteLevelDecoding {};
/// Turns runs of <0xNN> tokens into the text they encode, or into one U+FFFD each.
struct ByteFallbackDecoding {};
/// Joins all tokens into one.
struct FuseDecoding {};
/// Replaces a pattern or a literal text in every token.
struct ReplaceDecoding {
  std::variant<std::string, Regex> pattern;
  std::string content;
};

/// Turns tokens back into text: a chain of steps over the list of tokens, whose results are joined.
///
/// **Threads.** Const use from several threads.
class Decoder {
 public:
  using Step = std::variant<ByteLevelDecoding, ByteFallbackDecoding, FuseDecoding, ReplaceDecoding>;

  /// No decoder at all: tokens joined by spaces.
  Decoder() = default;
  explicit Decoder(std::vector<Step> steps) : steps_{std::move(steps)}, joins_with_spaces_{false} {}

  /// @brief True if a text is exactly the bytes of its tokens: such text can be decoded token by
  /// token without looking back.
  [[nodiscard]] bool is_byte_level() const noexcept {
    return steps_.size() == 1 && std::holds_alternative<ByteLevelDecoding>(steps_[0]);
  }

  [[nodiscard]] std::string decode(std::vector<std::string> tokens) const {
    for (const Step& step : steps_) {
      std::visit([&](const auto& what) { apply(what, tokens); }, step);
    }
    std::string text;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (joins_with_spaces_ && i > 0) text += ' ';
      text += tokens[i];
    }
    return text;
  }

 private:
  static void apply(const ByteLevelDecoding&, std::vector<std::string>& tokens) {
    std::string bytes;
    for (const std::string& token : tokens) append_as_bytes(bytes, token);
    tokens.assign(1, {});
    append_lossy_utf8(tokens[0], bytes);
  }

  static void apply(const FuseDecoding&, std::vector<std::string>& tokens) {
    std::string text;
    for (const std::string& token : tokens) text += token;
    tokens.clear();
    tokens.push_back(std::move(text));
  }

  static std::optional<char> byte_of(std::string_view token) {
    if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return std::nullopt;
    unsigned value = 0;
    const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, value, 16);
    if (error != std::errc{} || end != token.data() + 5) return std::nullopt;
    return static_cast<char>(value);
  }

  static void apply(const ByteFallbackDecoding&, std::vector<std::string>& tokens) {
    std::vector<std::string> out;
    std::string bytes;
    const auto flush = [&] {
      if (bytes.empty()) return;
      if (!first_invalid_utf8(bytes)) {
        out.push_back(bytes);
      } else {
        out.insert(out.end(), bytes.size(), std::string{utf8_replacement});
      }
      bytes.clear();
    };
    for (std::string& token : tokens) {
      if (const auto byte = byte_of(token)) {
        bytes += *byte;
      } else {
        flush();
        out.push_back(std::move(token));
      }
    }
    flush();
    tokens = std::move(out);
  }

  static void apply(const ReplaceDecoding& step, std::vector<std::string>& tokens) {
    RegexScratch scratch;
    for (std::string& token : tokens) {
      std::string out;
      std::size_t done = 0;
      const auto replace = [&](TextMatch match) {
        out.append(token, done, match.begin - done).append(step.content);
        done = match.end;
      };
      if (const auto* regex = std::get_if<Regex>(&step.pattern)) {
        if (!token.empty()) regex->for_each_match(token, scratch, replace);
      } else {
        const std::string& literal = std::get<std::string>(step.pattern);
        for (std::size_t at = token.find(literal); at != std::string::npos;
             at = token.find(literal, at + literal.size())) {
          replace({at, at + literal.size()});
        }
      }
      if (done > 0 || !out.empty()) token = out.append(token, done);
    }
  }

  std::vector<Step> steps_;
  bool joins_with_spaces_ = true;
};

}  // namespace block_streamer::inline v1
