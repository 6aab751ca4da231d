// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/unicode.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// A token that is searched in the text before the model sees it.
struct AddedToken {
  std::string content;
  std::int32_t id = 0;
  bool special = false;      ///< left out when decoding without special tokens
  bool single_word = false;  ///< only where no word character touches it
  bool lstrip = false;       ///< takes the white space before it along
  bool rstrip = false;       ///< takes the white space behind it along
  bool normalized = false;   ///< searched, normalized, in the normalized text
};

/// A set of added tokens that finds its members in a text: leftmost first, the longest at a place.
/// **Threads.** Const use from several threads.
class AddedTokens {
 public:
  AddedTokens() = default;
  /// @param tokens contents not empty and distinct
  explicit AddedTokens(std::vector<AddedToken> tokens) : tokens_{std::move(tokens)} {
    std::sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
      const auto lead = [](const AddedToken& t) {
        return static_cast<unsigned char>(t.content[0]);
      };
      if (lead(a) != lead(b)) return lead(a) < lead(b);
      return a.content.size() > b.content.size();
    });
    for (std::size_t i = tokens_.size(); i-- > 0;) {
      first_[static_cast<unsigned char>(tokens_[i].content[0])] = static_cast<std::uint32_t>(i + 1);
    }
  }

  [[nodiscard]] bool empty() const noexcept { return tokens_.empty(); }

  /// @brief Calls `use(std::string_view piece, std::optional<std::int32_t> id)` for the pieces of
  /// `text` in order: added tokens with their id, and the non-empty rest without.
  template <typename Use>
  void split(std::string_view text, Use&& use) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size();) {
      const AddedToken* token = match_at(text, at);
      if (token == nullptr) {
        ++at;
        continue;
      }
      std::size_t begin = at;
      std::size_t end = at += token->content.size();
      if (token->single_word && !stands_alone(text, begin, end)) continue;
      if (token->lstrip) begin = std::max(space_begin(text, begin), done);
      if (token->rstrip) end = space_end(text, end);
      if (done < begin) use(text.substr(done, begin - done), std::optional<std::int32_t>{});
      use(text.substr(begin, end - begin), std::optional{token->id});
      done = end;
    }
    if (done < text.size()) use(text.substr(done), std::optional<std::int32_t>{});
  }

 private:
  [[nodiscard]] const AddedToken* match_at(std::string_view text, std::size_t at) const noexcept {
    const char lead = text[at];
    for (std::size_t i = first_[static_cast<unsigned char>(lead)];
         i != 0 && i <= tokens_.size() && tokens_[i - 1].content[0] == lead; ++i) {
      const std::string& content = tokens_[i - 1].content;
      if (text.compare(at, content.size(), content) == 0) return &tokens_[i - 1];
    }
    return nullptr;
  }

  /// The character that ends at `end`; `end > 0`.
  static Utf8Step character_before(std::string_view text, std::size_t end) noexcept {
    std::size_t begin = end - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0U) == 0x80) --begin;
    return utf8_step(text, begin);
  }
  static bool stands_alone(std::string_view text, std::size_t begin, std::size_t end) noexcept {
    const bool left = begin == 0 || !is_word_character(character_before(text, begin).code_point);
    const bool right = end == text.size() || !is_word_character(utf8_step(text, end).code_point);
    return left && right;
  }
  static std::size_t space_begin(std::string_view text, std::size_t end) noexcept {
    while (end > 0) {
      const Utf8Step step = character_before(text, end);
      if (!is_white_space(step.code_point)) break;
      end -= step.length;
    }
    return end;
  }
  static std::size_t space_end(std::string_view text, std::size_t begin) noexcept {
    while (begin < text.size()) {
      const Utf8Step step = utf8_step(text, begin);
      if (!is_white_space(step.code_point)) break;
      begin += step.length;
    }
    return begin;
  }

  std::vector<AddedToken> tokens_;          ///< by first byte, then longest first
  std::array<std::uint32_t, 256> first_{};  ///< by first byte: index + 1 of its longest token
};

}  // namespace block_streamer::inline v1
