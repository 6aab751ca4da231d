// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/json_document.hpp>

#include <support/catch.hpp>

#include <string>

#include "fixtures.hpp"

namespace bs = block_streamer;
using text_fixtures::has;
using text_fixtures::message_of;

TEST_CASE("documents are built as written") {
  const std::string text = R"({"a":[1,-2,2.5,true,null,{"b":"é"}],"c":{}})";
  CHECK(bs::parse_json(text, "f.json") == nlohmann::json::parse(text));
}

TEST_CASE("duplicate keys, depth and syntax are refused with the file's name") {
  const auto refusal = [](const std::string& text) {
    return message_of<bs::FormatError>([&] { (void)bs::parse_json(text, "f.json"); });
  };
  CHECK(refusal(R"({"a":1,"a":2})") == "f.json: key 'a' is listed twice");
  CHECK(has(refusal(std::string(100000, '[')), "f.json: nested deeper than 64"));
  CHECK(has(refusal(std::string(64, '[') + std::string(64, ']')), "no error"));
  CHECK(has(refusal(R"({"a":)"), "f.json (at byte"));
  CHECK(has(refusal("{} x"), "f.json (at byte"));
  CHECK(has(refusal(""), "f.json (at byte"));
  CHECK(has(refusal("{\"a\":\"\xFF\"}"), "f.json (at byte"));
  CHECK(refusal(std::string("{}\0x", 4)) == "f.json (at byte 2): not valid JSON: a zero byte");
  CHECK(has(refusal("version https://git-lfs.github.com/spec/v1"), "Git LFS"));
}
