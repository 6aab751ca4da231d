// SPDX-License-Identifier: Apache-2.0
#include "letters.hpp"

#include <block_streamer/generate/generated_row.hpp>
#include <block_streamer/generate/stop_text.hpp>

#include <string>
#include <string_view>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;
using namespace block_streamer_test;

namespace {

/// Feeds `text` in pieces of `size` bytes.
std::string scan(std::vector<std::string> stops, std::string_view text, std::size_t size,
                 bool& stopped) {
  bs::StopScanner scanner{std::move(stops)};
  std::string out;
  for (std::size_t at = 0; at < text.size(); at += size) out += scanner.push(text.substr(at, size));
  stopped = scanner.stopped();
  return out + scanner.flush();
}

/// Logits that make a greedy row choose `id`.
std::vector<float> logits_of(std::int32_t id) {
  std::vector<float> logits(92, 0.F);
  logits[static_cast<std::size_t>(id)] = 1.F;
  return logits;
}

struct Fed {
  bs::GeneratedText result;
  std::string told;
};

Fed feed(const bs::GenerationOptions& options, const std::vector<std::int32_t>& ids) {
  const bs::Tokenizer tokenizer = letters();
  bs::GeneratedRow row{tokenizer, options, 0, 3};
  Fed fed;
  for (const std::int32_t id : ids) {
    if (row.running()) fed.told += row.step(logits_of(id));
  }
  if (row.running()) fed.told += row.finish(bs::FinishReason::cancelled);
  fed.result = row.take();
  return fed;
}

}  // namespace

TEST_CASE("a stop text is found however the text is cut into pieces") {
  for (std::size_t size = 1; size < 20; ++size) {
    bool stopped = false;
    CHECK(scan({"aab"}, "xaaaabyy", size, stopped) == "xaa");
    CHECK(stopped);
    CHECK(scan({"\n\n", "END"}, "one\ntwo ENEND three", size, stopped) == "one\ntwo EN");
    CHECK(stopped);
    CHECK(scan({"END"}, "nothing EN", size, stopped) == "nothing EN");
    CHECK_FALSE(stopped);
    CHECK(scan({}, "free", size, stopped) == "free");
    CHECK_FALSE(stopped);
  }
}

TEST_CASE("of stop texts that end together the longest counts") {
  bool stopped = false;
  CHECK(scan({"lo", "hello"}, "say hello", 4, stopped) == "say ");
  CHECK(stopped);
}

TEST_CASE("text that may begin a stop text waits, other text does not") {
  bs::StopScanner scanner{{"###"}};
  CHECK(scanner.push("a#") == "a");
  CHECK(scanner.push("#b") == "##b");
  CHECK(scanner.push("##") == "");
  CHECK(scanner.push("#c") == "");
  CHECK(scanner.stopped());
  CHECK(scanner.push("more") == "");
  CHECK(scanner.flush() == "");
}

TEST_CASE("a row ends at any of the end tokens, which are not text") {
  const Fed fed = feed({.eos_ids = {special_id, 5}}, {0, 1, special_id, 2});
  CHECK(fed.result.text == "!\"");
  CHECK(fed.told == fed.result.text);
  CHECK(fed.result.ids == std::vector<std::int32_t>{0, 1, special_id});
  CHECK(fed.result.finish_reason == bs::FinishReason::eos);
  CHECK(fed.result.prompt_token_count == 3);
  CHECK(feed({.eos_ids = {special_id, 5}}, {0, 5, 1}).result.text == "!");
}

TEST_CASE("special tokens that do not end a row are no text") {
  CHECK(feed({}, {0, special_id, 1}).result.text == "!\"");
}

TEST_CASE("a row ends after max_new_tokens with all text") {
  const Fed fed = feed({.max_new_tokens = 2}, {0, 1, 2});
  CHECK(fed.result.text == "!\"");
  CHECK(fed.told == fed.result.text);
  CHECK(fed.result.finish_reason == bs::FinishReason::length);
}

TEST_CASE("a row ends before a stop text that spans tokens") {
  const Fed fed = feed({.stop_texts = {"#$%"}}, {0, 2, 3, 4, 5});
  CHECK(fed.result.text == "!");
  CHECK(fed.told == "!");
  CHECK(fed.result.ids.size() == 4);
  CHECK(fed.result.finish_reason == bs::FinishReason::stop_text);
}

TEST_CASE("text held back for a stop text comes when the row ends otherwise") {
  const Fed fed = feed({.max_new_tokens = 3, .stop_texts = {"#$%"}}, {0, 2, 3});
  CHECK(fed.result.text == "!#$");
  CHECK(fed.told == fed.result.text);
  CHECK(fed.result.finish_reason == bs::FinishReason::length);
}

TEST_CASE("text comes in whole characters, a cut one only at the end") {
  const bs::Tokenizer tokenizer = letters();
  const bs::GenerationOptions options{.max_new_tokens = 4};
  bs::GeneratedRow row{tokenizer, options, 0, 1};
  CHECK(row.step(logits_of(first_byte_id)) == "");
  CHECK(row.step(logits_of(second_byte_id)) == "\u00e9");
  CHECK(row.step(logits_of(0)) == "!");
  CHECK(row.step(logits_of(first_byte_id)) == "\ufffd");
  CHECK(row.result().text == "\u00e9!\ufffd");
}
