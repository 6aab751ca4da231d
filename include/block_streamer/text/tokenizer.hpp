// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/tokenizer_json.hpp>
#include <block_streamer/text/tokenizer_parts.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Working memory of one thread that encodes many texts: words already seen and buffers. Bounded:
/// the word table starts afresh when it is full. It serves one tokenizer, which outlives it.
class EncodeScratch {
 public:
  static constexpr std::size_t max_words = 1U << 15U;
  static constexpr std::size_t max_word_bytes = 64;

 private:
  friend class Tokenizer;
  struct Range {
    std::size_t begin, end;
  };
  StringMap<Range> words_;
  std::vector<std::int32_t> ids_;  ///< of the words in words_
  PreTokenizer::Scratch pre_tokenizer_;
  Bpe::Scratch model_;
  const void* owner_ = nullptr;
};

/// @brief A byte-pair tokenizer read from a model's `tokenizer.json`: text to ids and back, as the
/// file describes.
///
/// **Threads.** Const use from several threads; an EncodeScratch belongs to one.
/// **Lifetime.** Owns everything; movable.
class Tokenizer {
 public:
  explicit Tokenizer(TokenizerParts parts) : parts_{std::move(parts)} {
    std::vector<AddedToken> raw, normalized;
    id_end_ = parts_.model.vocabulary().id_end();
    for (std::size_t i = 0; i < parts_.added.size(); ++i) {
      AddedToken token = parts_.added[i];
      added_ids_.emplace(token.content, token.id);
      if (token.normalized && parts_.normalize_nfc) token.content = to_nfc(token.content);
      id_end_ = std::max(id_end_, static_cast<std::size_t>(token.id) + 1);
      added_.push_back({token.id, i, token.content});
      (token.normalized ? normalized : raw).push_back(std::move(token));
    }
    std::sort(added_.begin(), added_.end(),
              [](const Added& a, const Added& b) { return a.id < b.id; });
    raw_ = AddedTokens{std::move(raw)};
    normalized_ = AddedTokens{std::move(normalized)};
  }

  /// @param path a model folder that holds `tokenizer.json`, or such a file
  /// @copydoc read_tokenizer_json
  [[nodiscard]] static Tokenizer open(const std::filesystem::path& path) {
    std::error_code ignored;
    const bool folder = std::filesystem::is_directory(path, ignored);
    return Tokenizer{read_tokenizer_json(folder ? path / "tokenizer.json" : path)};
  }

  /// @brief The ids of a text.
  /// @param add_special_tokens whether to add what the file puts around every text
  /// @throws Utf8Error naming the byte offset if `text` is not UTF-8.
  /// **Cost.** Some MB/s; the memory of a scratch, to be reused through the other overload.
  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text,
                                                 bool add_special_tokens = true) const {
    EncodeScratch scratch;
    return encode(text, add_special_tokens, scratch);
  }

  /// @copydoc encode
  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text, bool add_special_tokens,
                                                 EncodeScratch& scratch) const {
    expect_utf8(text, "text to encode");
    if (scratch.owner_ != this) scratch = EncodeScratch{};
    scratch.owner_ = this;
    std::vector<std::int32_t> ids;
    if (add_special_tokens) ids = parts_.before;
    raw_.split(text, [&](std::string_view piece, std::optional<std::int32_t> id) {
      if (id) return ids.push_back(*id);
      if (!parts_.normalize_nfc) return encode_normalized(piece, scratch, ids);
      encode_normalized(to_nfc(piece), scratch, ids);
    });
    if (add_special_tokens) ids.insert(ids.end(), parts_.after.begin(), parts_.after.end());
    return ids;
  }

  /// @brief The text of ids; what is not UTF-8 becomes U+FFFD.
  /// @param skip_special_tokens leaves special tokens out
  /// @throws Error naming the position and the id if no token has one of the ids.
  [[nodiscard]] std::string decode(std::span<const std::int32_t> ids,
                                   bool skip_special_tokens = true) const {
    std::vector<std::string> tokens;
    tokens.reserve(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::string* token = decoded_form(ids[i]);
      if (token == nullptr) throw unknown_id(ids[i], "at position " + std::to_string(i) + " ");
      if (!(skip_special_tokens && is_special(ids[i]))) tokens.push_back(*token);
    }
    return parts_.decoder.decode(std::move(tokens));
  }

  /// @brief The id of exactly this token, if there is one.
  [[nodiscard]] std::optional<std::int32_t> token_id(std::string_view token) const {
    const auto added = added_ids_.find(token);
    return added != added_ids_.end() ? std::optional{added->second}
                                     : parts_.model.vocabulary().find(token);
  }

  /// @brief The token as the file spells it (of byte-level tokenizers: in the byte alphabet).
  /// @throws Error if no token has this id.
  [[nodiscard]] const std::string& id_to_token(std::int32_t id) const {
    const Added* added = find_added(id);
    const std::string* token = added != nullptr ? &parts_.added[added->index].content
                                                : parts_.model.vocabulary().text_of(id);
    if (token == nullptr) throw unknown_id(id);
    return *token;
  }

  /// @brief The token as decoding starts from it: normalized, if it is an added token that is
  /// searched in the normalized text.
  /// @throws Error if no token has this id.
  [[nodiscard]] const std::string& token_to_decode(std::int32_t id) const {
    const std::string* token = decoded_form(id);
    if (token == nullptr) throw unknown_id(id);
    return *token;
  }

  /// @brief One more than the largest id. A model's table may have more rows than that.
  [[nodiscard]] std::size_t vocabulary_size() const noexcept { return id_end_; }

  /// @brief True for added tokens marked special; false for ids without a token.
  [[nodiscard]] bool is_special(std::int32_t id) const noexcept {
    const Added* added = find_added(id);
    return added != nullptr && parts_.added[added->index].special;
  }
  /// @brief True for tokens that are searched in the text before the model sees it.
  [[nodiscard]] bool is_added(std::int32_t id) const noexcept { return find_added(id) != nullptr; }

  [[nodiscard]] const Decoder& decoder() const noexcept { return parts_.decoder; }
  /// @brief The file this was read from.
  [[nodiscard]] const std::string& path() const noexcept { return parts_.path; }

 private:
  struct Added {
    std::int32_t id;
    std::size_t index;       ///< in parts_.added
    std::string decoded_as;  ///< its content, normalized if it is searched so
  };

  [[nodiscard]] const Added* find_added(std::int32_t id) const noexcept {
    const auto at = std::lower_bound(added_.begin(), added_.end(), id,
                                     [](const Added& a, std::int32_t b) { return a.id < b; });
    return at != added_.end() && at->id == id ? &*at : nullptr;
  }
  [[nodiscard]] const std::string* decoded_form(std::int32_t id) const noexcept {
    const Added* added = find_added(id);
    return added != nullptr ? &added->decoded_as : parts_.model.vocabulary().text_of(id);
  }
  [[nodiscard]] Error unknown_id(std::int32_t id, const std::string& place = {}) const {
    return Error{parts_.path + ": the id " + std::to_string(id) + " " + place +
                 "is not a token; ids run from 0 to " +
                 std::to_string(static_cast<std::int64_t>(id_end_) - 1)};
  }

  void encode_normalized(std::string_view text, EncodeScratch& scratch,
                         std::vector<std::int32_t>& ids) const {
    normalized_.split(text, [&](std::string_view piece, std::optional<std::int32_t> id) {
      if (id) return ids.push_back(*id);
      parts_.pre_tokenizer.for_each_word(piece, scratch.pre_tokenizer_, [&](std::string_view word) {
        encode_word(word, scratch, ids);
      });
    });
  }

  void encode_word(std::string_view word, EncodeScratch& scratch,
                   std::vector<std::int32_t>& ids) const {
    if (word.size() > EncodeScratch::max_word_bytes) {
      return parts_.model.encode_word(word, scratch.model_, ids);
    }
    auto known = scratch.words_.find(word);
    if (known == scratch.words_.end()) {
      if (scratch.words_.size() >= EncodeScratch::max_words) {
        scratch.words_.clear();
        scratch.ids_.clear();
      }
      const std::size_t begin = scratch.ids_.size();
      parts_.model.encode_word(word, scratch.model_, scratch.ids_);
      const EncodeScratch::Range range{begin, scratch.ids_.size()};
      known = scratch.words_.emplace(std::string{word}, range).first;
    }
    const auto begin = scratch.ids_.begin();
    ids.insert(ids.end(), begin + static_cast<std::ptrdiff_t>(known->second.begin),
               begin + static_cast<std::ptrdiff_t>(known->second.end));
  }

  TokenizerParts parts_;
  StringMap<std::int32_t> added_ids_;
  std::vector<Added> added_;  ///< by id
  AddedTokens raw_, normalized_;
  std::size_t id_end_ = 0;
};

}  // namespace block_streamer::inline v1
