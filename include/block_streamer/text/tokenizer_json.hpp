// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/bpe_json.hpp>
#include <block_streamer/text/json_document.hpp>
#include <block_streamer/text/text_file.hpp>
#include <block_streamer/text/tokenizer_parts.hpp>

#include <array>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// Reads a `tokenizer.json`. Components and options that are not implemented are refused by name,
/// because to ignore one would change ids silently.
class TokenizerJsonReader {
 public:
  using json = nlohmann::json;

  explicit TokenizerJsonReader(std::string path) { parts_.path = std::move(path); }

  [[nodiscard]] TokenizerParts read(std::string_view text) {
    const json document = parse_json(text, parts_.path);
    const JsonObject root{document, parts_.path, "tokenizer"};
    root.allow_only({"version", "truncation", "padding", "added_tokens", "normalizer",
                     "pre_tokenizer", "post_processor", "decoder", "model"});
    for (const char* key : {"truncation", "padding"}) {
      if (root.find(key) != nullptr) root.refuse(std::string{key} + " is not supported");
    }
    if (root.find("version") != nullptr && root.string("version") != "1.0") {
      root.refuse("version \"" + root.string("version") + "\"");
    }
    parts_.model = read_bpe(root.object("model"));
    if (root.find("normalizer") != nullptr) read_normalizer(root.object("normalizer"));
    if (root.find("added_tokens") != nullptr) read_added(root);
    std::vector<PreTokenizer::Step> words;
    if (root.find("pre_tokenizer") != nullptr)
      read_pre_tokenizer(root.object("pre_tokenizer"), words);
    parts_.pre_tokenizer = PreTokenizer{std::move(words)};
    if (root.find("post_processor") != nullptr) read_post_processor(root.object("post_processor"));
    if (root.find("decoder") != nullptr) {
      std::vector<Decoder::Step> steps;
      read_decoder(root.object("decoder"), steps);
      parts_.decoder = Decoder{std::move(steps)};
    }
    return std::move(parts_);
  }

 private:
  /// The parts of a Sequence component, or the component itself.
  template <typename Read>
  static bool each_of_sequence(const JsonObject& component, const char* list, Read&& read) {
    if (component.string("type") != "Sequence") return false;
    component.allow_only({"type", list});
    std::size_t index = 0;
    for (const json& part : component.array(list)) {
      read(JsonObject{part, component.path(),
                      component.name() + "[" + std::to_string(index++) + "]"});
    }
    return true;
  }

  // ---- added tokens
  void read_added(const JsonObject& root) {
    const Vocabulary& vocabulary = parts_.model.vocabulary();
    auto next = static_cast<std::int32_t>(vocabulary.token_count());
    StringMap<std::int32_t> seen;
    for (const json& item : root.array("added_tokens")) {
      const JsonObject entry{item, parts_.path,
                             "added_tokens[" + std::to_string(parts_.added.size()) + "]"};
      AddedToken token = read_added_token(entry);
      const auto known = vocabulary.find(token.content);
      // Ids are given by position, not by the file's numbers; the two must agree.
      const std::int32_t expected = known ? *known : next++;
      if (token.id != expected) {
        entry.fail("has the id " + std::to_string(token.id) + ", but \"" + token.content +
                   "\" must have " + std::to_string(expected));
      }
      if (!seen.emplace(token.content, token.id).second) {
        entry.fail("repeats \"" + token.content + "\"");
      }
      if (!known && vocabulary.text_of(token.id) != nullptr) {
        entry.fail("takes the id of \"" + *vocabulary.text_of(token.id) + "\"");
      }
      parts_.added.push_back(std::move(token));
    }
  }

  static AddedToken read_added_token(const JsonObject& entry) {
    entry.allow_only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token;
    token.content = entry.string("content");
    if (token.content.empty()) entry.fail("has no content");
    token.id = checked_token_id(entry, entry.required("id"), token.content);
    token.special = entry.boolean("special");
    token.single_word = entry.boolean("single_word");
    token.lstrip = entry.boolean("lstrip");
    token.rstrip = entry.boolean("rstrip");
    token.normalized = entry.boolean("normalized");
    return token;
  }

  // ---- normalizer and pre-tokenizer
  void read_normalizer(const JsonObject& component) {
    if (each_of_sequence(component, "normalizers",
                         [this](const JsonObject& part) { read_normalizer(part); })) {
      return;
    }
    if (component.string("type") != "NFC") refuse_type(component);
    component.allow_only({"type"});
    parts_.normalize_nfc = true;
  }

  void read_pre_tokenizer(const JsonObject& component, std::vector<PreTokenizer::Step>& steps) {
    if (each_of_sequence(component, "pretokenizers",
                         [&](const JsonObject& part) { read_pre_tokenizer(part, steps); })) {
      return;
    }
    const std::string& type = component.string("type");
    if (type == "ByteLevel") {
      component.allow_only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
      ByteLevelStep step{component.boolean("add_prefix_space"), {}};
      if (component.boolean_or("use_regex", true)) {
        step.words.emplace(PreTokenizer::default_words, parts_.path, component.name());
      }
      steps.emplace_back(std::move(step));
    } else if (type == "Digits") {
      component.allow_only({"type", "individual_digits"});
      steps.emplace_back(DigitsStep{component.boolean("individual_digits")});
    } else if (type == "Split") {
      component.allow_only({"type", "pattern", "behavior", "invert"});
      steps.emplace_back(SplitStep{read_pattern(component), read_behavior(component),
                                   component.boolean("invert")});
    } else {
      refuse_type(component);
    }
  }

  [[nodiscard]] static std::variant<std::string, Regex> read_pattern(const JsonObject& component) {
    const JsonObject pattern = component.object("pattern");
    pattern.allow_only({"String", "Regex"});
    if (pattern.value().size() != 1) pattern.fail("must be one String or one Regex");
    if (pattern.find("Regex") != nullptr) {
      return Regex{pattern.string("Regex"), component.path(), component.name()};
    }
    if (pattern.string("String").empty()) pattern.refuse("an empty pattern");
    return pattern.string("String");
  }

  static SplitBehavior read_behavior(const JsonObject& component) {
    constexpr std::array<std::string_view, 5> names = {"Isolated", "Removed", "MergedWithPrevious",
                                                       "MergedWithNext", "Contiguous"};
    const auto at = std::find(names.begin(), names.end(), component.string("behavior"));
    if (at == names.end()) component.refuse("the behavior " + component.string("behavior"));
    return static_cast<SplitBehavior>(at - names.begin());
  }

  // ---- post-processor
  void read_post_processor(const JsonObject& component) {
    if (each_of_sequence(component, "processors",
                         [this](const JsonObject& part) { read_post_processor(part); })) {
      return;
    }
    const std::string& type = component.string("type");
    if (type == "ByteLevel") {  // moves offsets only
      return component.allow_only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    }
    if (type != "TemplateProcessing") refuse_type(component);
    component.allow_only({"type", "single", "pair", "special_tokens"});
    read_template(component);
  }

  void read_template(const JsonObject& component) {
    std::vector<std::int32_t> before, after;
    bool seen = false;
    for (const json& item : component.array("single")) {
      const JsonObject piece{item, component.path(), component.name() + ".single"};
      piece.allow_only({"Sequence", "SpecialToken"});
      if (piece.value().size() != 1) piece.fail("must be one Sequence or one SpecialToken");
      if (piece.find("Sequence") != nullptr) {
        if (seen || piece.object("Sequence").string("id") != "A") {
          piece.refuse("a template other than special tokens around one text");
        }
        seen = true;
      } else {
        const auto ids = template_token(component, piece.object("SpecialToken").string("id"));
        auto& side = seen ? after : before;
        side.insert(side.end(), ids.begin(), ids.end());
      }
    }
    if (!seen) component.refuse("a template without the text");
    before.insert(before.end(), parts_.before.begin(), parts_.before.end());
    parts_.before = std::move(before);
    parts_.after.insert(parts_.after.end(), after.begin(), after.end());
  }

  std::vector<std::int32_t> template_token(const JsonObject& component, const std::string& name) {
    const JsonObject tokens = component.object("special_tokens");
    const JsonObject entry = tokens.object(name.c_str());
    std::vector<std::int32_t> ids;
    for (const json& value : entry.array("ids")) {
      const std::int32_t id = checked_token_id(tokens, value, name);
      const bool known = parts_.model.vocabulary().text_of(id) != nullptr ||
                         std::any_of(parts_.added.begin(), parts_.added.end(),
                                     [id](const AddedToken& token) { return token.id == id; });
      if (!known) tokens.fail("names the id " + std::to_string(id) + ", which no token has");
      ids.push_back(id);
    }
    return ids;
  }

  // ---- decoder
  void read_decoder(const JsonObject& component, std::vector<Decoder::Step>& steps) {
    if (each_of_sequence(component, "decoders",
                         [&](const JsonObject& part) { read_decoder(part, steps); })) {
      return;
    }
    const std::string& type = component.string("type");
    if (type == "ByteLevel") {
      component.allow_only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
      steps.emplace_back(ByteLevelDecoding{});
    } else if (type == "ByteFallback" || type == "Fuse") {
      component.allow_only({"type"});
      if (type == "Fuse") {
        steps.emplace_back(FuseDecoding{});
      } else {
        steps.emplace_back(ByteFallbackDecoding{});
      }
    } else if (type == "Replace") {
      component.allow_only({"type", "pattern", "content"});
      steps.emplace_back(ReplaceDecoding{read_pattern(component), component.string("content")});
    } else {
      refuse_type(component);
    }
  }

  TokenizerParts parts_;
};

}  // namespace detail

/// @brief Reads and checks a `tokenizer.json`.
/// @throws StorageError if it cannot be read.
/// @throws FormatError if it is not a tokenizer: bad JSON, a missing or mistyped field, an id given
/// twice, a merge or template that names an unknown token.
/// @throws UnsupportedError naming the file and the component or option that is not implemented.
/// **Cost.** A few times the file's size in memory while it is read.
[[nodiscard]] inline TokenizerParts read_tokenizer_json(const std::filesystem::path& path) {
  constexpr std::uint64_t size_limit = std::uint64_t{1} << 28U;  // ten times the largest in use
  const std::string text = read_text_file(path, size_limit);
  return detail::TokenizerJsonReader{path.string()}.read(text);
}

}  // namespace block_streamer::inline v1
