// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/chat_template.hpp>

#include <support/catch.hpp>

#include <string>
#include <vector>

#include "fixtures.hpp"

namespace bs = block_streamer;
using text_fixtures::contents;
using text_fixtures::has;
using text_fixtures::Ids;
using text_fixtures::json;
using text_fixtures::message_of;

namespace {

std::vector<bs::ChatMessage> messages_of(const json& list) {
  std::vector<bs::ChatMessage> messages;
  for (const json& item : list) {
    messages.push_back({item["role"], item["content"], {}});
    if (item.contains("reasoning_content")) messages.back().reasoning = item["reasoning_content"];
  }
  return messages;
}

void check_texts(const bs::ChatTemplate& chat, const json& rows) {
  for (const json& row : rows) {
    const auto messages = messages_of(row["messages"]);
    INFO(row["text"].dump());
    CHECK(chat.render(messages, {false, {}}) == row["text"].get<std::string>());
    CHECK(chat.render(messages) ==
          row["text"].get<std::string>() + row["prompt"].get<std::string>());
    if (!row.contains("silent_prompt")) continue;
    CHECK(chat.render(messages, {true, false}) ==
          row["text"].get<std::string>() + row["silent_prompt"].get<std::string>());
    CHECK(chat.render(messages, {true, true}) == chat.render(messages));
  }
}

void check_ids(const bs::ChatTemplate& chat, const bs::Tokenizer& tokenizer, const json& rows) {
  for (const json& row : rows) {
    const auto messages = messages_of(row["messages"]);
    INFO(row["text"].dump());
    Ids ids = row["ids"].get<Ids>();
    const bs::TextRow trained = chat.encode_conversation(tokenizer, messages);
    CHECK(trained.tokens == ids);
    CHECK(trained.trained == row["trained"].get<std::vector<std::uint8_t>>());
    for (const json& id : row["prompt_ids"]) ids.push_back(id);
    CHECK(chat.encode_prompt(tokenizer, messages) == ids);
  }
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("both revisions of Qwen3's template render as recorded") {
  const json chats = text_fixtures::load("chats.json");
  const bs::Tokenizer tokenizer = text_fixtures::tokenizer_named("qwen");
  for (const char* name : {"qwen3_first.jinja", "qwen3_revised.jinja"}) {
    const bs::ChatTemplate chat{contents(text_fixtures::folder() / name), name};
    CHECK(chat.style().name == "Qwen3");
    check_texts(chat, chats["qwen3_first"]);
    check_ids(chat, tokenizer, chats["qwen3_first"]);
  }
}

TEST_CASE("SmolLM2's template renders as recorded, with its default system message") {
  const json chats = text_fixtures::load("chats.json");
  const bs::ChatTemplate chat{chats["smollm2_template"].get<std::string>(), "t.jinja"};
  CHECK(chat.style().default_system ==
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
  check_texts(chat, chats["smollm2"]);
}

TEST_CASE("SmolLM2's prompts and training rows have the recorded ids") {
  const auto folder = text_fixtures::smollm2();
  if (!folder) return;
  const auto chat = bs::ChatTemplate::open(*folder);
  check_ids(chat, bs::Tokenizer::open(*folder), text_fixtures::load("chats.json")["smollm2"]);
}

TEST_CASE("layout and quotes of a template do not matter, its meaning does") {
  const std::string qwen = contents(text_fixtures::folder() / "qwen3_revised.jinja");
  const auto known = [](const std::string& text) {
    return bs::recognize_template(text).has_value();
  };
  CHECK(known(qwen + "\n"));
  CHECK(known(replaced(qwen, "message.role == \"user\"", "message['role']  ==  'user'")));
  CHECK(known(replaced(qwen, "    {%- elif message.role == \"assistant\" %}\n        {%- set",
                       "{%- elif message.role == \"assistant\" -%}{%- set")));
  CHECK_FALSE(known(replaced(qwen, "'\\n</think>\\n\\n'", "'\\n</think>\\n'")));
  CHECK_FALSE(known(
      replaced(qwen, "loop.last or (not loop.last and reasoning_content)", "reasoning_content")));
  CHECK_FALSE(known(replaced(qwen, "enable_thinking is false", "enable_thinking is true")));
  CHECK_FALSE(known(replaced(qwen, "{%- if add_generation_prompt %}", "{%- if true %}")));
  CHECK_FALSE(known("x" + qwen));
  CHECK_FALSE(known(qwen + "x"));
  const std::string smol = text_fixtures::load("chats.json")["smollm2_template"];
  CHECK(known(replaced(smol, "SmolLM, trained", "Other, trained")));
  CHECK_FALSE(known(replaced(smol, "'<|im_end|>' + '\n'", "'<|im_end|>'")));
  CHECK_FALSE(known(replaced(smol, "SmolLM, trained", "' + x + '")));
  CHECK_FALSE(known(replaced(smol, "{% endfor %}", "{% endfor %} ")));
  CHECK_FALSE(known(""));
}

TEST_CASE("any cut of a template is unknown") {
  const std::string qwen = contents(text_fixtures::folder() / "qwen3_first.jinja");
  for (std::size_t size = 0; size < qwen.size(); size += 11) {
    CHECK_FALSE(bs::recognize_template(qwen.substr(0, size)).has_value());
  }
}

TEST_CASE("the later variants without a thinking switch are known") {
  const std::string qwen = contents(text_fixtures::folder() / "qwen3_revised.jinja");
  const std::size_t at = qwen.find("    {%- if enable_thinking");
  const std::string plain = qwen.substr(0, at) + "{%- endif %}";
  const bs::ChatTemplate chat{plain, "t"};
  const std::vector<bs::ChatMessage> messages{{"user", "q", {}}};
  CHECK(chat.render(messages) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
  CHECK_THROWS_AS(chat.render(messages, {true, false}), bs::UnsupportedError);
  const bs::ChatTemplate open{
      replaced(plain, "assistant\\n' }}\n{%- endif", "assistant\\n<think>\\n' }}\n{%- endif"), "t"};
  CHECK(open.render(messages).ends_with("<|im_start|>assistant\n<think>\n"));
}

TEST_CASE("what cannot be rendered is refused by name") {
  const auto unknown = message_of<bs::UnsupportedError>(
      [] { bs::ChatTemplate("{{ bos_token }}{% for m in messages %}\nmore", "d/t.jinja"); });
  CHECK(unknown ==
        "d/t.jinja: unknown chat template, beginning with "
        "\"{{ bos_token }}{% for m in messages %}\"");
  const json chats = text_fixtures::load("chats.json");
  const bs::ChatTemplate chat{chats["smollm2_template"].get<std::string>(), "t.jinja"};
  const std::vector<bs::ChatMessage> tool{{"user", "q", {}}, {"tool", "7", {}}};
  CHECK(has(message_of<bs::UnsupportedError>([&] { (void)chat.render(tool); }),
            "message 1 has the role \"tool\""));
  CHECK_THROWS_AS(chat.render({}), bs::ContractViolation);
  const std::vector<bs::ChatMessage> user{{"user", "q", {}}};
  CHECK(has(message_of<bs::UnsupportedError>([&] {
              (void)chat.encode_conversation(text_fixtures::tokenizer_named("gpt2"), user);
            }),
            "<|im_end|>"));
}

TEST_CASE("the template is found in its own file or in the tokenizer's configuration") {
  const std::string smol = text_fixtures::load("chats.json")["smollm2_template"];
  const text_fixtures::ScratchFile jinja{"chat_template.jinja", smol};
  CHECK(bs::ChatTemplate::open(jinja.folder()).style().default_system.has_value());
  const text_fixtures::ScratchFile config{"tokenizer_config.json",
                                          json{{"chat_template", smol}}.dump()};
  CHECK(bs::ChatTemplate::open(config.folder()).style().default_system.has_value());
  const text_fixtures::ScratchFile none{"tokenizer_config.json", "{}"};
  CHECK_THROWS_AS(bs::ChatTemplate::open(none.folder()), bs::FormatError);
  const text_fixtures::ScratchFile empty{"other", ""};
  CHECK_THROWS_AS(bs::ChatTemplate::open(empty.folder()), bs::FormatError);
}
