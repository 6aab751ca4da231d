// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/text_dataset.hpp>

#include <support/catch.hpp>

#include <string>
#include <vector>

#include "fixtures.hpp"

namespace bs = block_streamer;
using text_fixtures::has;
using text_fixtures::Ids;
using text_fixtures::message_of;

namespace {

using Mask = std::vector<std::uint8_t>;

struct Fixture {
  bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("qwen");
  bs::ChatTemplate chat{text_fixtures::contents(text_fixtures::folder() / "qwen3_first.jinja"),
                        "t"};
  std::int32_t eos = tokenizer.token_id("<|endoftext|>").value();

  bs::TextDataset open(const std::string& name, std::string_view text, std::size_t seq_len = 512,
                       bool keep = false) const {
    const text_fixtures::ScratchFile file{name, text};
    return bs::TextDataset::open(file.path(), tokenizer, &chat, {seq_len, eos, keep});
  }
};

Ids joined(std::initializer_list<Ids> parts) {
  Ids all;
  for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace

TEST_CASE_METHOD(Fixture, "a text is cut into consecutive windows") {
  std::string text;
  for (int i = 0; i < 50; ++i) text += "line " + std::to_string(i * i) + "\n";
  const Ids all = tokenizer.encode(text);
  const std::size_t seq_len = 16;
  REQUIRE(all.size() % seq_len > 1);
  for (const bool keep : {false, true}) {
    const auto data = open("a.txt", text, seq_len, keep);
    CHECK(data.rows().size() == all.size() / seq_len + (keep ? 1 : 0));
    Ids together;
    for (const bs::TextRow& row : data.rows()) {
      together.insert(together.end(), row.tokens.begin(), row.tokens.end());
      CHECK(row.trained.size() == row.tokens.size());
      CHECK(row.trained[0] == 0);
      CHECK(row.trained_count() == row.tokens.size() - 1);
    }
    CHECK(together == Ids(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(together.size())));
    if (keep) CHECK(together == all);
  }
}

TEST_CASE_METHOD(Fixture, "a text shorter than a window is one row, a lone token none") {
  CHECK(open("a.txt", "a b c", 512).rows().size() == 1);
  const Ids all = tokenizer.encode("a-b-c");
  CHECK(open("a.txt", "a-b-c", all.size() - 1, true).rows().size() == 1);
  CHECK_THROWS_AS(open("a.txt", "a"), bs::FormatError);
}

TEST_CASE_METHOD(Fixture, "text rows are trained throughout and end with EOS") {
  const auto data =
      open("a.jsonl", "{\"text\":\"fox é\", \"extra\":[1]}\r\n\n  \n{\"text\":\"a\"}");
  REQUIRE(data.rows().size() == 2);
  CHECK(data.rows()[0].tokens == joined({tokenizer.encode("fox é"), {eos}}));
  CHECK(data.rows()[0].trained_count() == data.rows()[0].tokens.size() - 1);
  CHECK(data.rows()[1].tokens == joined({tokenizer.encode("a"), {eos}}));
  CHECK(data.rows()[1].trained == Mask{0, 1});
}

TEST_CASE_METHOD(Fixture, "only the completion is trained") {
  const auto data = open("a.jsonl", R"({"prompt":"1 + 1 =","completion":" 2"})");
  const Ids prompt = tokenizer.encode("1 + 1 ="), completion = tokenizer.encode(" 2", false);
  const bs::TextRow& row = data.rows()[0];
  CHECK(row.tokens == joined({prompt, completion, {eos}}));
  Mask expected(prompt.size(), 0);
  expected.resize(row.tokens.size(), 1);
  CHECK(row.trained == expected);
}

TEST_CASE_METHOD(Fixture, "conversations train the assistant's turns") {
  const auto data = open("a.jsonl", R"({"messages":[{"role":"user","content":"q"},)"
                                    R"({"role":"assistant","content":"a"}]})");
  const std::vector<bs::ChatMessage> messages{{"user", "q", {}}, {"assistant", "a", {}}};
  CHECK(data.rows()[0].tokens == chat.encode_conversation(tokenizer, messages).tokens);
  CHECK(data.rows()[0].trained == chat.encode_conversation(tokenizer, messages).trained);
}

TEST_CASE_METHOD(Fixture,
                 "long rows are truncated, rows left without a target dropped, both counted") {
  const std::string line = R"({"prompt":"the quick brown fox jumps","completion":"x"})";
  const std::size_t prompt = tokenizer.encode("the quick brown fox jumps").size();
  const auto data = open("a.jsonl",
                         line + "\n{\"text\":\"the quick brown fox jumps over\"}\n" +
                             "{\"text\":\"\"}\n{\"text\":\"a\"}\n",
                         prompt);
  CHECK(data.rows().size() == 2);
  CHECK(data.rows()[0].tokens.size() == prompt);
  CHECK(data.truncated_rows() == 2);
  CHECK(data.dropped_rows() == 2);
}

TEST_CASE_METHOD(Fixture, "a bad row is named by file and line") {
  const auto refusal = [&](const std::string& line) {
    return message_of<bs::Error>(
        [&] { (void)open("a.jsonl", "{\"text\":\"fine\"}\n\n" + line + "\n"); });
  };
  for (const char* line :
       {R"({"txt":"x"})", R"({"text":"x","messages":[]})", R"({"prompt":"x"})",
        R"({"completion":"x"})", R"({"text":7})", "[1]", "7", "{", R"({"text":"a"} x)",
        R"({"messages":[]})", R"({"messages":[7]})", R"({"messages":[{"role":"user"}]})",
        R"({"messages":[{"role":"user","content":["x"]}]})", R"({"text":null})",
        R"({"messages":[{"role":"tool","content":"x"}]})",
        R"({"messages":[{"role":"assistant","content":"x","tool_calls":[1]}]})"}) {
    INFO(line << " gives " << refusal(line));
    CHECK(has(refusal(line), "a.jsonl, line 3"));
  }
  CHECK(has(refusal(R"({"messages":[{"role":"tool","content":"x"}]})"), "\"tool\""));
}

TEST_CASE_METHOD(Fixture, "empty, malformed and foreign data are refused") {
  CHECK(has(message_of<bs::FormatError>([&] { (void)open("a.txt", ""); }), "no text"));
  CHECK(has(message_of<bs::FormatError>([&] { (void)open("a.jsonl", "\n\n"); }), "no row"));
  CHECK(has(message_of<bs::FormatError>([&] { (void)open("a.jsonl", "{\"text\":\"\"}"); }),
            "none of its 1 rows"));
  CHECK_THROWS_AS(open("a.csv", "a,b"), bs::UnsupportedError);
  try {
    open("a.jsonl", "{\"text\":\"a\"}\n\xFF");
    FAIL("did not throw");
  } catch (const bs::Utf8Error& error) {
    CHECK(error.offset() == 13);
  }
  CHECK_THROWS_AS(bs::TextDataset::open("no/such.txt", tokenizer, nullptr, {}), bs::StorageError);
  const text_fixtures::ScratchFile file{"a.jsonl",
                                        R"({"messages":[{"role":"user","content":"x"}]})"};
  CHECK(has(message_of<bs::FormatError>([&] {
              (void)bs::TextDataset::open(file.path(), tokenizer, nullptr, {8, eos, false});
            }),
            "chat template"));
}
