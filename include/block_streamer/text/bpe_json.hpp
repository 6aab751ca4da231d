// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/bpe.hpp>
#include <block_streamer/text/json_document.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace block_streamer::inline v1::detail {

[[noreturn]] inline void refuse_type(const JsonObject& component) {
  component.refuse("the component " + component.string("type") + " is not supported");
}

inline std::int32_t checked_token_id(const JsonObject& where, const nlohmann::json& value,
                                     const std::string& token) {
  if (!value.is_number_integer() || value < 0 || value >= Vocabulary::max_ids) {
    where.fail("gives \"" + token + "\" an id that is not an integer from 0 to " +
               std::to_string(Vocabulary::max_ids - 1));
  }
  return value.get<std::int32_t>();
}

inline Vocabulary read_vocabulary(const JsonObject& vocab) {
  Vocabulary vocabulary;
  for (const auto& item : vocab.value().items()) {
    const std::int32_t id = checked_token_id(vocab, item.value(), item.key());
    if (!vocabulary.add(item.key(), id)) {
      vocab.fail("gives the id " + std::to_string(id) + " to \"" + *vocabulary.text_of(id) +
                 "\" and to \"" + item.key() + "\"");
    }
  }
  return vocabulary;
}

inline std::int32_t id_of(const JsonObject& where, const Vocabulary& vocabulary,
                          std::string_view token, const std::string& user) {
  if (const auto id = vocabulary.find(token)) return *id;
  where.fail(user + " names \"" + std::string{token} + "\", which is not in the vocabulary");
}

/// A merge is spelled "left right" or ["left", "right"].
inline std::pair<std::string_view, std::string_view> merge_sides(const JsonObject& model,
                                                                 const nlohmann::json& merge,
                                                                 const std::string& name) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
  }
  if (merge.is_string()) {
    const std::string_view text = merge.get_ref<const std::string&>();
    const std::size_t space = text.find(' ');
    if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  }
  model.fail(name + " is not a pair of tokens");
}

inline MergeTable read_merges(const JsonObject& model, const Vocabulary& vocabulary) {
  const nlohmann::json& list = model.array("merges");
  MergeTable merges{list.size()};
  std::uint32_t rank = 0;
  for (const nlohmann::json& merge : list) {
    const std::string name = "merge " + std::to_string(rank);
    const auto [left, right] = merge_sides(model, merge, name);
    const std::int32_t result = id_of(model, vocabulary, std::string{left}.append(right), name);
    merges.set(id_of(model, vocabulary, left, name), id_of(model, vocabulary, right, name),
               {rank++, result});
  }
  return merges;
}

/// @brief The model of a tokenizer file.
/// @throws FormatError, UnsupportedError as read_tokenizer_json does
inline Bpe read_bpe(const JsonObject& model) {
  if (model.find("type") != nullptr && model.string("type") != "BPE") refuse_type(model);
  model.allow_only({"type", "dropout", "unk_token", "continuing_subword_prefix",
                    "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges", "vocab",
                    "merges"});
  if (const nlohmann::json* dropout = model.find("dropout");
      dropout != nullptr && *dropout != 0.0) {
    model.refuse("dropout is not supported");
  }
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.find(affix) != nullptr && !model.string(affix).empty()) {
      model.refuse(std::string{affix} + " is not supported");
    }
  }
  Vocabulary vocabulary = read_vocabulary(model.object("vocab"));
  BpeOptions options{model.boolean_or("ignore_merges", false),
                     model.boolean_or("byte_fallback", false),
                     model.boolean_or("fuse_unk", false),
                     {}};
  if (model.find("unk_token") != nullptr) {
    options.unknown = id_of(model, vocabulary, model.string("unk_token"), "unk_token");
  }
  MergeTable merges = read_merges(model, vocabulary);
  return Bpe{std::move(vocabulary), std::move(merges), options};
}

}  // namespace block_streamer::inline v1::detail
