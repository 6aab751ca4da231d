// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/regex.hpp>

#include <support/catch.hpp>

#include <string>
#include <vector>

#include "fixtures.hpp"

namespace bs = block_streamer;
using text_fixtures::has;
using text_fixtures::message_of;

namespace {
std::vector<std::string> matches(std::string_view pattern, std::string_view text) {
  const bs::Regex regex{pattern, "t.json", "pre_tokenizer"};
  bs::RegexScratch scratch;
  std::vector<std::string> found;
  regex.for_each_match(text, scratch, [&](bs::TextMatch match) {
    found.emplace_back(text.substr(match.begin, match.end - match.begin));
  });
  return found;
}
using Found = std::vector<std::string>;
}  // namespace

TEST_CASE("patterns match over characters with their Unicode properties") {
  CHECK(matches(R"(\p{L}+)", "abc, déf 日本") == Found{"abc", "déf", "日本"});
  CHECK(matches(R"((?i:'s|'ll))", "it'S we'LL") == Found{"'S", "'LL"});
  CHECK(matches(R"(\s+(?!\S)|\s+)", "a   b  ") == Found{"  ", " ", "  "});
}

TEST_CASE("white space does not include the Mongolian vowel separator") {
  CHECK(matches(R"(\s)", "a\u180E\u00A0b\u0085") == Found{"\u00A0", "\u0085"});
  CHECK(matches(R"([^\s]+)", "a\u180Eb c") == Found{"a\u180E"
                                                    "b",
                                                    "c"});
  CHECK(matches(R"(\S+)", "a\u180Eb c") == Found{"a\u180E"
                                                 "b",
                                                 "c"});
  CHECK(matches(R"([\S]+)", "a\u180Eb c") == Found{"a\u180E"
                                                   "b",
                                                   "c"});
}

TEST_CASE("word characters are the alphabetic ones and some more") {
  CHECK(matches(R"(\w+)", "a_〇²ⓐ\u0301٣ ①©") == Found{"a_〇²ⓐ\u0301٣"});
  CHECK(matches(R"(\W+)", "a_〇²ⓐ ①©b") == Found{" ①©"});
}

TEST_CASE("an empty match behind a match is passed over") {
  CHECK(matches(R"(\d*)", "12é3") == Found{"12", "3"});
  CHECK(matches(R"(\d*)", "é12éa") == Found{"", "12", "", ""});
}

TEST_CASE("constructs without one meaning are refused by name") {
  const auto refusal = [](std::string_view pattern) {
    return message_of<bs::UnsupportedError>([&] { bs::Regex{pattern, "t.json", "pre_tokenizer"}; });
  };
  for (const char* pattern :
       {"^a",         "a$",        "(?m)a",      "(?i)a",  R"(\h)",   R"(\bx)", R"(\1)",
        R"(\p{Han})", R"(\p{^L})", R"(\pL)",     "[a[b]]", "[a&&b]",  "[]a]",   "a{1,2}+",
        "a{2}?",      "a{,3}",     "(?<name>a)", "(?#c)",  R"(\xE9)", R"(\R)",  "a\\"}) {
    CHECK(has(refusal(pattern), "t.json: pre_tokenizer: the pattern uses"));
  }
  CHECK(has(refusal(R"(\p{Han})"), R"(\p{Han})"));
}

TEST_CASE("what is no pattern is a format error") {
  for (const char* pattern : {"(", "a**", ")", "[z-a]", "*"}) {
    const auto text = message_of<bs::FormatError>([&] {
      bs::Regex{pattern, "t.json", "pre_tokenizer"};
    });
    CHECK(has(text, "t.json: pre_tokenizer"));
  }
  CHECK_THROWS_AS((bs::Regex{"a\xFF", "t.json", "p"}), bs::Utf8Error);
}

TEST_CASE("long texts neither exhaust the matcher's stack nor its limits") {
  const std::string spaces(1000000, ' ');
  CHECK(matches(R"(\s*[\r\n]+|\s+(?!\S)|\s+)", spaces) == Found{spaces});
  const std::string pairs = [] {
    std::string text;
    for (int i = 0; i < 200000; ++i) text += "ab";
    return text;
  }();
  CHECK(matches(R"((?:ab|a(?=b)|x)+)", pairs) == Found{pairs});
}

TEST_CASE("a pattern that explodes ends with an error that names it") {
  const auto text =
      message_of<bs::Error>([] { matches(R"((?:a|a|aa)+[^a])", std::string(60, 'a')); });
  CHECK(has(text, "t.json: pre_tokenizer: matching failed"));
}
