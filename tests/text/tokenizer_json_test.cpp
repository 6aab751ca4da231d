// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/tokenizer_json.hpp>

#include <support/catch.hpp>

#include <functional>
#include <string>

#include "fixtures.hpp"

namespace bs = block_streamer;
using text_fixtures::has;
using text_fixtures::json;
using text_fixtures::message_of;

namespace {

json small() {
  return json::parse(R"({"version":"1.0","truncation":null,"padding":null,
    "added_tokens":[{"id":4,"content":"<e>","single_word":false,"lstrip":false,"rstrip":false,
                     "normalized":false,"special":true}],
    "normalizer":null,
    "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true},
    "post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A","type_id":0}},
       {"SpecialToken":{"id":"<e>","type_id":0}}],"pair":[],
       "special_tokens":{"<e>":{"id":"<e>","ids":[4],"tokens":["<e>"]}}},
    "decoder":{"type":"ByteLevel"},
    "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":"",
       "end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,
       "vocab":{"a":0,"b":1,"ab":2,"c":3},"merges":["a b"]}})");
}

struct Change {
  const char* pointer;
  const char* value;  ///< JSON; empty: removed
  const char* named;  ///< must stand in the message
};

template <typename E>
void expect_refused(const Change& change) {
  json document = small();
  const json::json_pointer pointer{change.pointer};
  if (std::string{change.value}.empty()) {
    document[pointer.parent_pointer()].erase(pointer.back());
  } else {
    document[pointer] = json::parse(change.value);
  }
  const text_fixtures::ScratchFile file{"tokenizer.json", document.dump()};
  const std::string text = message_of<E>([&] { (void)bs::read_tokenizer_json(file.path()); });
  INFO(change.pointer << " = " << change.value << " gives: " << text);
  CHECK(has(text, change.named));
  CHECK(has(text, file.path().string()));
}

}  // namespace

TEST_CASE("the small tokenizer these tests damage is sound") {
  const auto tokenizer = text_fixtures::tokenizer_from(small());
  CHECK(tokenizer.encode("abc<e>") == text_fixtures::Ids{2, 3, 4, 4});
}

TEST_CASE("components and options that are not implemented are refused by name") {
  const Change changes[] = {
      {"/model/type", R"("Unigram")", "Unigram"},
      {"/model/dropout", "0.1", "dropout"},
      {"/model/end_of_word_suffix", R"("</w>")", "end_of_word_suffix"},
      {"/model/continuing_subword_prefix", R"("##")", "continuing_subword_prefix"},
      {"/model/novelty", "1", "novelty"},
      {"/normalizer", R"({"type":"NFKC"})", "normalizer: the component NFKC"},
      {"/normalizer", R"({"type":"Sequence","normalizers":[{"type":"Lowercase"}]})",
       "normalizer[0]: the component Lowercase"},
      {"/pre_tokenizer", R"({"type":"Metaspace"})", "Metaspace"},
      {"/pre_tokenizer/novelty", "true", "novelty"},
      {"/pre_tokenizer",
       R"({"type":"Split","pattern":{"Regex":"a"},"behavior":"Mixed","invert":false})", "Mixed"},
      {"/pre_tokenizer",
       R"({"type":"Split","pattern":{"Regex":"^a"},"behavior":"Isolated","invert":false})",
       "the anchor ^"},
      {"/pre_tokenizer",
       R"({"type":"Split","pattern":{"String":""},"behavior":"Isolated","invert":false})",
       "empty pattern"},
      {"/post_processor", R"({"type":"BertProcessing"})", "BertProcessing"},
      {"/post_processor/single", R"([{"Sequence":{"id":"B","type_id":0}}])", "template"},
      {"/post_processor/single", "[]", "template"},
      {"/decoder", R"({"type":"WordPiece"})", "WordPiece"},
      {"/truncation", R"({"max_length":8})", "truncation"},
      {"/padding", R"({"length":8})", "padding"},
      {"/version", R"("2.0")", "2.0"},
      {"/novelty", "1", "novelty"},
      {"/added_tokens/0/novelty", "1", "novelty"}};
  for (const Change& change : changes) expect_refused<bs::UnsupportedError>(change);
}

TEST_CASE("fields that are missing, mistyped or contradict each other are format errors") {
  const Change changes[] = {
      {"/model", "", "lacks \"model\""},
      {"/model", "[]", "must be an object"},
      {"/model/vocab", "", "lacks \"vocab\""},
      {"/model/vocab", "[1]", "must be an object"},
      {"/model/merges", "{}", "must be an array"},
      {"/model/merges", R"(["a  b"])", "merge 0 is not a pair"},
      {"/model/merges", R"(["ab"])", "merge 0 is not a pair"},
      {"/model/merges", R"([["a","b","c"]])", "merge 0 is not a pair"},
      {"/model/merges", "[7]", "merge 0 is not a pair"},
      {"/model/merges", R"(["a b","a x"])", "merge 1 names \"ax\""},
      {"/model/merges", R"([["b","c"]])", "merge 0 names \"bc\""},
      {"/model/vocab/b", "0", "gives the id 0"},
      {"/model/vocab/b", "-1", "integer from 0"},
      {"/model/vocab/b", "1.5", "integer from 0"},
      {"/model/vocab/b", "4194304", "integer from 0"},
      {"/model/vocab/b", "18446744073709551615", "integer from 0"},
      {"/model/vocab/b", R"("1")", "integer from 0"},
      {"/model/unk_token", R"("?")", "unk_token names"},
      {"/model/fuse_unk", R"("yes")", "must be true or false"},
      {"/added_tokens", "{}", "must be an array"},
      {"/added_tokens/0/id", "5", "must have 4"},
      {"/added_tokens/0/content", R"("a")", "must have 0"},
      {"/added_tokens/0/content", R"("")", "no content"},
      {"/added_tokens/0/special", "", "lacks \"special\""},
      {"/added_tokens/1", R"({"id":5,"content":"<e>","single_word":false,"lstrip":false,
        "rstrip":false,"normalized":false,"special":true})",
       "repeats"},
      {"/pre_tokenizer/type", "", "lacks \"type\""},
      {"/pre_tokenizer/add_prefix_space", "1", "must be true or false"},
      {"/pre_tokenizer",
       R"({"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated","invert":false})",
       "pre_tokenizer"},
      {"/pre_tokenizer", R"({"type":"Sequence","pretokenizers":7})", "must be an array"},
      {"/post_processor/special_tokens", "{}", "lacks \"<e>\""},
      {"/post_processor/special_tokens/<e>/ids", "[9]", "names the id 9"},
      {"/decoder", "[]", "must be an object"}};
  for (const Change& change : changes) expect_refused<bs::FormatError>(change);
}

TEST_CASE("an added token may not take the id of a word") {
  json document = small();
  document["model"]["vocab"].erase("c");
  document["model"]["vocab"]["c"] = 3;
  document["model"]["vocab"]["d"] = 5;  // four tokens up to id 3, one beyond: the next id is 5
  document["added_tokens"][0]["id"] = 5;
  document["post_processor"] = nullptr;
  CHECK(has(message_of<bs::FormatError>([&] { text_fixtures::tokenizer_from(document); }),
            "takes the id of \"d\""));
}

TEST_CASE("any cut of a file is refused without a crash") {
  const std::string whole = small().dump();
  for (std::size_t size = 0; size < whole.size(); size += 7) {
    const text_fixtures::ScratchFile file{"tokenizer.json", whole.substr(0, size)};
    CHECK_THROWS_AS(bs::read_tokenizer_json(file.path()), bs::FormatError);
  }
}

TEST_CASE("any flipped byte gives a tokenizer or an error") {
  const std::string whole = small().dump();
  for (std::size_t at = 0; at < whole.size(); at += 3) {
    for (const char with : {'"', '0', '}', '\x80', ' '}) {
      std::string text = whole;
      text[at] = with;
      const text_fixtures::ScratchFile file{"tokenizer.json", text};
      try {
        (void)bs::Tokenizer::open(file.path()).encode("abc<e> ab");
      } catch (const bs::Error&) {
      }
    }
  }
}

TEST_CASE("a missing file and a folder are storage errors") {
  CHECK_THROWS_AS(bs::read_tokenizer_json("no/such/tokenizer.json"), bs::StorageError);
  CHECK_THROWS_AS(bs::read_tokenizer_json(text_fixtures::folder()), bs::StorageError);
}
