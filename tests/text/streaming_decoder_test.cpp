// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/streaming_decoder.hpp>

#include <support/catch.hpp>

#include <string>

#include "fixtures.hpp"

namespace bs = block_streamer;
using text_fixtures::Ids;
using text_fixtures::json;

namespace {
std::string streamed(const bs::Tokenizer& tokenizer, const Ids& ids) {
  bs::StreamingDecoder decoder{tokenizer};
  std::string text;
  for (const std::int32_t id : ids) {
    const std::string piece = decoder.push(id);
    CHECK_FALSE(bs::first_invalid_utf8(piece).has_value());
    text += piece;
  }
  return text + decoder.flush();
}
}  // namespace

TEST_CASE("streamed pieces are whole characters and together the decoded text") {
  const json all = text_fixtures::load("encodings.json");
  for (const auto& base : all["bases"].items()) {
    const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named(base.key());
    for (const json& recorded : base.value()["ids"]) {
      const auto ids = recorded.get<Ids>();
      INFO(base.key() << " " << recorded.dump());
      CHECK(streamed(tokenizer, ids) == tokenizer.decode(ids));
    }
  }
}

TEST_CASE("malformed ids stream as they decode") {
  const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("qwen");
  const json all = text_fixtures::load("encodings.json");
  for (const json& item : all["bases"]["qwen"]["decode"]) {
    const auto ids = item[0].get<Ids>();
    CHECK(streamed(tokenizer, ids) == tokenizer.decode(ids));
  }
}

TEST_CASE("text is given out as soon as a character is whole") {
  const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("qwen");
  bs::StreamingDecoder decoder{tokenizer};
  const auto byte = [&](unsigned char b) {
    std::string token;
    bs::append_as_characters(token, std::string(1, static_cast<char>(b)));
    return tokenizer.token_id(token).value();
  };
  CHECK(decoder.push(byte(0xF0)).empty());
  CHECK(decoder.push(byte(0x9F)).empty());
  CHECK(decoder.push(tokenizer.token_id("<|im_end|>").value()).empty());
  CHECK(decoder.push(byte(0x98)).empty());
  CHECK(decoder.push(byte(0x80)) == "\xF0\x9F\x98\x80");
  CHECK(decoder.push(byte(0xC3)).empty());
  CHECK(decoder.push(byte('a')) ==
        "\xEF\xBF\xBD"
        "a");
  CHECK(decoder.push(byte(0xE2)).empty());
  CHECK(decoder.flush() == "\xEF\xBF\xBD");
  CHECK(decoder.flush().empty());
  CHECK_THROWS_AS(decoder.push(1 << 20), bs::Error);
}

TEST_CASE("a decoder that looks at neighbours streams too, and garbage does not dam it up") {
  const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("fallback");
  const auto token = [&](const char* text) { return tokenizer.token_id(text).value(); };
  CHECK(streamed(tokenizer, {token("a"), token("<0xC3>"), token("<0xA9>"), token("▁"),
                             token("b")}) == "a\xC3\xA9 b");
  bs::StreamingDecoder decoder{tokenizer};
  std::size_t given = 0;
  for (int i = 0; i < 100; ++i) given += decoder.push(token("<0x80>")).size();
  CHECK(given > 80);
}
