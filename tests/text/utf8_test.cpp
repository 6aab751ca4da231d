// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/utf8.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("every scalar value survives encoding and decoding") {
  for (std::uint32_t point = 0; point < 0x110000; ++point) {
    if (point >= 0xD800 && point < 0xE000) continue;
    std::string text;
    bs::append_utf8(text, point);
    const bs::Utf8Step step = bs::utf8_step(text, 0);
    if (step.kind != bs::Utf8Step::Kind::valid || step.code_point != point ||
        step.length != text.size()) {
      FAIL("U+" << std::hex << point);
    }
  }
}

TEST_CASE("the first malformed byte is found behind any alignment of ASCII") {
  for (const std::string bad :
       {"\x80", "\xC0\x80", "\xC3(", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
        "\xF4\x90\x80\x80", "\xF5", "\xFF", "\xE2\x82"}) {
    for (std::size_t before = 0; before < 20; ++before) {
      const std::string text = std::string(before, 'x') + "\xC3\xA9" + bad;
      CHECK(bs::first_invalid_utf8(text) == before + 2);
    }
  }
  CHECK_FALSE(bs::first_invalid_utf8(std::string_view{"a\0b\xF4\x8F\xBF\xBF", 7}).has_value());
}

TEST_CASE("a refusal names place and offset") {
  try {
    bs::expect_utf8("abc\xFFxyz", "data.txt");
    FAIL("did not throw");
  } catch (const bs::Utf8Error& error) {
    CHECK(error.offset() == 3);
    CHECK(std::string{error.what()} == "data.txt (at byte 3): not valid UTF-8");
  }
}

TEST_CASE("each longest beginning of a character becomes one replacement") {
  const auto lossy = [](std::string_view bytes) {
    std::string out;
    bs::append_lossy_utf8(out, bytes);
    return out;
  };
  CHECK(lossy("a\xF0\x9F\x98z") == "a\xEF\xBF\xBDz");
  CHECK(lossy("\xE2\x82") == "\xEF\xBF\xBD");
  CHECK(lossy("\xED\xA0\x80") == "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  CHECK(lossy("\xF0\x9F\x98\x80") == "\xF0\x9F\x98\x80");
}

TEST_CASE("a character cut at the end can be kept for later") {
  std::string out;
  CHECK(bs::append_lossy_utf8(out, "ab\xF0\x9F\x98", true) == 2);
  CHECK(out == "ab");
  CHECK(bs::append_lossy_utf8(out, "\xFF\xC3", true) == 1);
  CHECK(out == "ab\xEF\xBF\xBD");
}
