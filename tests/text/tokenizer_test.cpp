// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/tokenizer.hpp>

#include <support/catch.hpp>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "fixtures.hpp"

namespace bs = block_streamer;
using text_fixtures::has;
using text_fixtures::Ids;
using text_fixtures::json;
using text_fixtures::message_of;

namespace {

std::string digest(const Ids& ids) {
  std::uint64_t value = 0xCBF29CE484222325ULL;
  for (const std::int32_t id : ids) {
    value = (value ^ static_cast<std::uint32_t>(id)) * 0x100000001B3ULL;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

/// Every recorded result of one tokenizer; each mismatch is reported with its text.
void check_recorded(const bs::Tokenizer& tokenizer, const json& texts, const json& recorded) {
  bs::EncodeScratch scratch;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto text = texts[i].get<std::string>();
    INFO("text " << i << ": " << texts[i].dump(-1, ' ', true));
    CHECK(tokenizer.encode(text, false, scratch) == recorded["ids"][i].get<Ids>());
  }
  for (const json& index : recorded["round_trip"]) {
    const auto ids = recorded["ids"][index.get<std::size_t>()].get<Ids>();
    CHECK(tokenizer.decode(ids, false) == texts[index.get<std::size_t>()].get<std::string>());
  }
  for (const json& item : recorded["decode"]) {
    const auto ids = item[0].get<Ids>();
    INFO("ids " << item[0].dump());
    CHECK(tokenizer.decode(ids) == item[1].get<std::string>());
    CHECK(tokenizer.decode(ids, false) == item[2].get<std::string>());
  }
  for (const json& item : recorded["long"]) {
    std::string text;
    for (int n = item[1].get<int>(); n > 0; --n) text += item[0].get<std::string>();
    const Ids ids = tokenizer.encode(text, false);
    INFO("repeated: " << item[0].dump(-1, ' ', true));
    CHECK(ids.size() == item[2].get<std::size_t>());
    CHECK(digest(ids) == item[3].get<std::string>());
  }
}

json patched(json document, const json& patch) {
  for (const auto& item : patch.items()) {
    if (item.key() == "model") {
      document["model"].update(item.value());
    } else {
      document[item.key()] = item.value();
    }
  }
  return document;
}

}  // namespace

TEST_CASE("small tokenizers of the known styles give the recorded ids and texts") {
  const json all = text_fixtures::load("encodings.json");
  for (const auto& base : all["bases"].items()) {
    INFO(base.key());
    const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named(base.key());
    check_recorded(tokenizer, all["texts"], base.value());
    CHECK(tokenizer.encode("a b") == base.value()["with_special"].get<Ids>());
  }
}

TEST_CASE("each component and option gives the recorded ids and texts") {
  const json all = text_fixtures::load("encodings.json");
  REQUIRE(all["variants"].size() > 30);
  for (const json& variant : all["variants"]) {
    INFO(variant["name"].get<std::string>());
    const json base = text_fixtures::load(variant["base"].get<std::string>() + ".json");
    check_recorded(text_fixtures::tokenizer_from(patched(base, variant["patch"])), all["short"],
                   variant);
  }
}

TEST_CASE("SmolLM2's tokenizer gives the recorded ids and texts") {
  const auto folder = text_fixtures::smollm2();
  if (!folder) return;
  const json recorded = text_fixtures::load("encodings.json");
  const json file = json::parse(text_fixtures::contents(*folder / "tokenizer.json"));
  for (const char* part : {"pre_tokenizer", "decoder"}) {
    if (file[part] == recorded["smollm2"][part]) continue;
    WARN("skipped: the " << part << " in " << folder->string() << " is not the recorded one");
    return;
  }
  const bs::Tokenizer tokenizer = bs::Tokenizer::open(*folder);
  check_recorded(tokenizer, recorded["texts"], recorded["smollm2"]);
  CHECK(tokenizer.vocabulary_size() == 49152);
  CHECK(tokenizer.token_id("<|im_end|>") == 2);
  CHECK(tokenizer.is_special(2));
}

TEST_CASE("both spellings of merges mean the same") {
  json document = text_fixtures::load("llama3.json");
  const auto texts = text_fixtures::load("encodings.json")["texts"];
  const bs::Tokenizer strings = text_fixtures::tokenizer_from(document);
  REQUIRE(document["model"]["merges"][0].is_string());
  for (json& merge : document["model"]["merges"]) {
    const auto text = merge.get<std::string>();
    merge = json::array({text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)});
  }
  const bs::Tokenizer pairs = text_fixtures::tokenizer_from(document);
  for (const json& text : texts) {
    CHECK(strings.encode(text.get<std::string>()) == pairs.encode(text.get<std::string>()));
  }
}

TEST_CASE("text that is not UTF-8 is refused with its byte offset") {
  const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("qwen");
  try {
    (void)tokenizer.encode("abcdefgh\xC3(");
    FAIL("did not throw");
  } catch (const bs::Utf8Error& error) {
    CHECK(error.offset() == 8);
  }
}

TEST_CASE("ids are looked up both ways and checked") {
  const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("qwen");
  const auto end = static_cast<std::int32_t>(tokenizer.vocabulary_size());
  for (std::int32_t id = 0; id < end; ++id)
    CHECK(tokenizer.token_id(tokenizer.id_to_token(id)) == id);
  CHECK_FALSE(tokenizer.token_id("no such token").has_value());
  const auto think = tokenizer.token_id("<think>");
  REQUIRE(think.has_value());
  CHECK(tokenizer.is_added(*think));
  CHECK_FALSE(tokenizer.is_special(*think));
  CHECK_FALSE(tokenizer.is_special(-1));
  for (const std::int32_t bad : {end, -1, INT32_MAX, INT32_MIN}) {
    const auto text = message_of<bs::Error>([&] { (void)tokenizer.decode(Ids{0, bad}); });
    CHECK(has(text, "the id " + std::to_string(bad) + " at position 1 is not a token"));
    CHECK_THROWS_AS(tokenizer.id_to_token(bad), bs::Error);
  }
}

TEST_CASE("a full word table and a change of tokenizer leave ids unchanged") {
  const bs::Tokenizer qwen = text_fixtures::tokenizer_named("qwen");
  const bs::Tokenizer gpt2 = text_fixtures::tokenizer_named("gpt2");
  bs::EncodeScratch scratch;
  std::string many;
  for (std::size_t i = 0; i < 2 * bs::EncodeScratch::max_words; ++i) {
    std::string word = " ";
    for (std::size_t n = i + 1; n > 0; n /= 7) word += static_cast<char>('a' + n % 7);
    many += word;
  }
  const Ids first = qwen.encode(many, false, scratch);
  CHECK(qwen.encode(many, false, scratch) == first);
  CHECK(gpt2.encode("the fox", false, scratch) == gpt2.encode("the fox", false));
  CHECK(qwen.decode(first) == many);
}

TEST_CASE("threads share a tokenizer") {
  const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("llama3");
  const std::string text = "The quick brown fox, 12345 times.\n\n  Съешь же ещё 日本語";
  const Ids expected = tokenizer.encode(text);
  std::vector<Ids> results(4);
  std::vector<std::thread> threads;
  for (Ids& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) result = tokenizer.encode(text);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const Ids& result : results) CHECK(result == expected);
}

TEST_CASE("a tokenizer can be moved") {
  bs::Tokenizer first = text_fixtures::tokenizer_named("qwen");
  const Ids ids = first.encode("<|im_start|>moved");
  const bs::Tokenizer second = std::move(first);
  CHECK(second.encode("<|im_start|>moved") == ids);
  CHECK(second.decode(ids, false) == "<|im_start|>moved");
}
