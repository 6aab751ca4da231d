// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/pre_tokenizer.hpp>

#include <support/catch.hpp>

#include <string>
#include <vector>

namespace bs = block_streamer;

namespace {
using Words = std::vector<std::string>;

Words words_of(const bs::PreTokenizer& pre_tokenizer, std::string_view text) {
  bs::PreTokenizer::Scratch scratch;
  Words words;
  pre_tokenizer.for_each_word(text, scratch,
                              [&](std::string_view word) { words.emplace_back(word); });
  return words;
}

bs::PreTokenizer splitting(bs::SplitBehavior behavior, bool invert = false) {
  std::vector<bs::PreTokenizer::Step> steps;
  steps.emplace_back(bs::SplitStep{std::string{"-"}, behavior, invert});
  return bs::PreTokenizer{std::move(steps)};
}
}  // namespace

TEST_CASE("a delimiter goes where its behaviour says") {
  using enum bs::SplitBehavior;
  const std::string text = "The-final--countdown";
  CHECK(words_of(splitting(removed), text) == Words{"The", "final", "countdown"});
  CHECK(words_of(splitting(isolated), text) == Words{"The", "-", "final", "-", "-", "countdown"});
  CHECK(words_of(splitting(merged_with_previous), text) ==
        Words{"The-", "final-", "-", "countdown"});
  CHECK(words_of(splitting(merged_with_next), text) == Words{"The", "-final", "-", "-countdown"});
  CHECK(words_of(splitting(contiguous), text) == Words{"The", "-", "final", "--", "countdown"});
  CHECK(words_of(splitting(removed, true), text) == Words{"-", "-", "-"});
}

TEST_CASE("steps apply to the pieces of the steps before") {
  std::vector<bs::PreTokenizer::Step> steps;
  steps.emplace_back(bs::DigitsStep{true});
  steps.emplace_back(bs::ByteLevelStep{true, {}});
  const bs::PreTokenizer both{std::move(steps)};
  CHECK(words_of(both, "é12 x") == Words{"ĠÃ©", "Ġ1", "Ġ2", "Ġx"});
  CHECK(words_of(both, "").empty());
}
