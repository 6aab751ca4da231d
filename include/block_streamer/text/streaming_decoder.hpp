// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/tokenizer.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Turns generated ids into text as they come, in whole characters: what is printed never
/// ends inside one. Special tokens give nothing. For byte-level tokenizers the pieces put together
/// are exactly `decode` of all ids.
///
/// **Threads.** One thread. **Lifetime.** The tokenizer must outlive it.
class StreamingDecoder {
 public:
  explicit StreamingDecoder(const Tokenizer& tokenizer) : tokenizer_{&tokenizer} {}

  /// @brief Takes one id and returns the text that is now certain, perhaps none.
  /// @throws Error if no token has this id; the decoder is unchanged.
  [[nodiscard]] std::string push(std::int32_t id) {
    const std::string& token = tokenizer_->token_to_decode(id);
    if (tokenizer_->is_special(id)) return {};
    return tokenizer_->decoder().is_byte_level() ? push_bytes(token) : push_window(id);
  }

  /// @brief Returns what is left, a cut character as U+FFFD, and starts afresh.
  [[nodiscard]] std::string flush() {
    std::string text;
    append_lossy_utf8(text, std::exchange(bytes_, {}));
    if (!pending_.empty()) text += new_text();
    context_.clear();
    pending_.clear();
    return text;
  }

 private:
  /// More tokens than one character can consist of: beyond, the text is malformed anyway.
  static constexpr std::size_t max_pending = 8;

  std::string push_bytes(const std::string& token) {
    append_as_bytes(bytes_, token);
    std::string text;
    bytes_.erase(0, append_lossy_utf8(text, bytes_, true));
    return text;
  }

  /// Other decoders may look at neighbours: decodes a window and returns how it grew.
  std::string push_window(std::int32_t id) {
    pending_.push_back(id);
    std::string text = new_text();
    if (text.ends_with(utf8_replacement) && pending_.size() < max_pending) return {};
    context_ = std::exchange(pending_, {});
    return text;
  }

  [[nodiscard]] std::string new_text() const {
    const std::string before = tokenizer_->decode(context_);
    std::vector<std::int32_t> window = context_;
    window.insert(window.end(), pending_.begin(), pending_.end());
    const std::string all = tokenizer_->decode(window);
    return all.starts_with(before) ? all.substr(before.size()) : tokenizer_->decode(pending_);
  }

  const Tokenizer* tokenizer_;
  std::string bytes_;  ///< the beginning of a character
  std::vector<std::int32_t> context_, pending_;
};

}  // namespace block_streamer::inline v1
