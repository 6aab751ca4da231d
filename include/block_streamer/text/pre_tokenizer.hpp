// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/byte_alphabet.hpp>
#include <block_streamer/text/regex.hpp>
#include <block_streamer/text/unicode.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace block_streamer::inline v1 {

/// What becomes of the matches ("delimiters") when a text is split.
enum class SplitBehavior : std::uint8_t {
  isolated,              ///< each match is a piece
  removed,               ///< matches vanish
  merged_with_previous,  ///< a match ends the piece before it
  merged_with_next,      ///< a match begins the piece after it
  contiguous             ///< adjacent matches form one piece
};

/// A stretch of text that matched, or one between matches.
struct SplitSpan {
  std::size_t begin = 0;
  std::size_t end = 0;
  bool is_match = false;
};

/// @brief Turns spans that cover a text in order into pieces; `is_match` of a result marks what
/// SplitBehavior::removed drops. Works in place.
inline void apply_behavior(std::vector<SplitSpan>& spans, SplitBehavior behavior) {
  if (behavior == SplitBehavior::removed) return;
  const bool backwards = behavior == SplitBehavior::merged_with_next;
  if (backwards) std::reverse(spans.begin(), spans.end());
  std::size_t kept = 0;
  bool previous = false;
  for (const SplitSpan span : spans) {
    const bool joins = behavior == SplitBehavior::isolated     ? false
                       : behavior == SplitBehavior::contiguous ? span.is_match == previous
                                                               : span.is_match && !previous;
    previous = span.is_match;
    if (joins && kept > 0) {
      (backwards ? spans[kept - 1].begin : spans[kept - 1].end) = backwards ? span.begin : span.end;
    } else {
      spans[kept++] = {span.begin, span.end, false};
    }
  }
  spans.resize(kept);
  if (backwards) std::reverse(spans.begin(), spans.end());
}

/// Spells each byte as its character of the byte alphabet, after an optional split into words.
struct ByteLevelStep {
  bool add_prefix_space = false;
  std::optional<Regex> words;
};

/// Separates numbers from the rest, one piece a digit or one a run.
struct DigitsStep {
  bool individual = false;
};

/// Splits at a pattern or a literal text; inverted: at what lies between its matches.
struct SplitStep {
  std::variant<std::string, Regex> pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;
};

/// Cuts normalized text into the words that the model encodes one by one. A sequence of steps; each
/// is applied to every piece of the one before.
///
/// **Threads.** Const use from several threads, each with its own Scratch.
class PreTokenizer {
 public:
  using Step = std::variant<ByteLevelStep, DigitsStep, SplitStep>;

  /// The word split of byte-level tokenizers that bring no pattern of their own.
  static constexpr std::string_view default_words =
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

  /// Working memory of one thread, reused between calls.
  class Scratch {
    friend class PreTokenizer;
    struct OfStep {
      RegexScratch regex;
      std::vector<SplitSpan> spans;
      std::string prefixed, mapped;
    };
    std::vector<OfStep> steps_;
  };

  PreTokenizer() = default;
  explicit PreTokenizer(std::vector<Step> steps) : steps_{std::move(steps)} {}

  /// @brief Calls `use(std::string_view word)` for each non-empty word, in order. The word is valid
  /// during the call only.
  /// @pre `text` is UTF-8.
  /// **Cost.** Linear for usual patterns; memory for the spans of the steps that need them.
  template <typename Use>
  void for_each_word(std::string_view text, Scratch& scratch, Use&& use) const {
    scratch.steps_.resize(steps_.size());
    run(0, text, scratch, use);
  }

 private:
  template <typename Use>
  void run(std::size_t step, std::string_view text, Scratch& scratch, Use& use) const {
    if (text.empty()) return;
    if (step == steps_.size()) return void(use(text));
    const auto next = [&](std::string_view piece) { run(step + 1, piece, scratch, use); };
    std::visit([&](const auto& what) { apply(what, text, scratch.steps_[step], next); },
               steps_[step]);
  }

  template <typename Next>
  static void apply(const ByteLevelStep& step, std::string_view text, Scratch::OfStep& scratch,
                    const Next& next) {
    if (step.add_prefix_space && text.front() != ' ') {
      scratch.prefixed.assign(1, ' ').append(text);
      text = scratch.prefixed;
    }
    const auto emit = [&](std::size_t begin, std::size_t end) {
      scratch.mapped.clear();
      append_as_characters(scratch.mapped, text.substr(begin, end - begin));
      next(scratch.mapped);
    };
    if (!step.words) return emit(0, text.size());
    isolate(*step.words, text, scratch.regex, emit);
  }

  template <typename Next>
  static void apply(const DigitsStep& step, std::string_view text, Scratch::OfStep&,
                    const Next& next) {
    std::size_t begin = 0;
    bool previous = false;
    for (std::size_t at = 0; at < text.size();) {
      const Utf8Step character = utf8_step(text, at);
      const bool digit = is_numeric(character.code_point);
      if (digit != previous || (digit && step.individual)) {
        next(text.substr(begin, at - begin));
        begin = at;
      }
      previous = digit;
      at += character.length;
    }
    next(text.substr(begin));
  }

  template <typename Next>
  static void apply(const SplitStep& step, std::string_view text, Scratch::OfStep& scratch,
                    const Next& next) {
    if (step.behavior == SplitBehavior::isolated && step.pattern.index() == 1) {
      return isolate(
          std::get<Regex>(step.pattern), text, scratch.regex,
          [&](std::size_t begin, std::size_t end) { next(text.substr(begin, end - begin)); });
    }
    scratch.spans.clear();
    collect(step, text, scratch);
    apply_behavior(scratch.spans, step.behavior);
    for (const SplitSpan& span : scratch.spans) {
      if (!span.is_match) next(text.substr(span.begin, span.end - span.begin));
    }
  }

  /// The matches and what lies between them, without a list: the common case on long texts.
  template <typename Emit>
  static void isolate(const Regex& regex, std::string_view text, RegexScratch& scratch,
                      const Emit& emit) {
    std::size_t done = 0;
    regex.for_each_match(text, scratch, [&](TextMatch match) {
      if (done != match.begin) emit(done, match.begin);
      emit(match.begin, match.end);
      done = match.end;
    });
    if (done != text.size()) emit(done, text.size());
  }

  static void collect(const SplitStep& step, std::string_view text, Scratch::OfStep& scratch) {
    std::size_t done = 0;
    const auto add = [&](TextMatch match) {
      if (done != match.begin) scratch.spans.push_back({done, match.begin, step.invert});
      scratch.spans.push_back({match.begin, match.end, !step.invert});
      done = match.end;
    };
    if (const auto* regex = std::get_if<Regex>(&step.pattern)) {
      regex->for_each_match(text, scratch.regex, add);
    } else {
      const std::string& literal = std::get<std::string>(step.pattern);
      for (std::size_t at = text.find(literal); at != std::string_view::npos;
           at = text.find(literal, at + literal.size())) {
        add({at, at + literal.size()});
      }
    }
    if (done != text.size()) scratch.spans.push_back({done, text.size(), step.invert});
  }

  std::vector<Step> steps_;
};

}  // namespace block_streamer::inline v1
