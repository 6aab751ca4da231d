// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/unicode.hpp>

#include <support/catch.hpp>

#include <string>

namespace bs = block_streamer;

TEST_CASE("numbers are more than decimal digits") {
  for (const char32_t c : U"09٣１½Ⅷ①²〇") {
    if (c != 0) CHECK(bs::is_numeric(c));
  }
  for (const char32_t c : U"aX一é -") {
    if (c != 0) CHECK_FALSE(bs::is_numeric(c));
  }
}

TEST_CASE("white space is the property, without U+180E and zero-width characters") {
  CHECK(bs::is_white_space(0x85));
  CHECK(bs::is_white_space(0x3000));
  CHECK_FALSE(bs::is_white_space(0x180E));
  CHECK_FALSE(bs::is_white_space(0x200B));
}

TEST_CASE("NFC composes, reorders marks and keeps excluded compositions apart") {
  CHECK(bs::to_nfc("e\xCC\x81") == "\xC3\xA9");
  CHECK(bs::to_nfc("a\xCC\x82\xCC\xA3") == "\xE1\xBA\xAD");  // marks out of order
  CHECK(bs::to_nfc("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8") == "\xEA\xB0\x81");  // Hangul
  CHECK(bs::to_nfc("\xE0\xA5\x98") == "\xE0\xA4\x95\xE0\xA4\xBC");  // U+0958 stays decomposed
  CHECK(bs::to_nfc("\xE2\x84\xAB") == "\xC3\x85");                  // Angstrom sign
  CHECK(bs::to_nfc(std::string("a\0b\xCC\x81", 5)) == std::string("a\0b\xCC\x81", 5));
}

TEST_CASE("a long run of marks in the worst order is sorted at once") {
  std::string text = "a", sorted = "a";
  for (int i = 0; i < 100000; ++i) text += "\xCC\x82\xCC\xA3";  // above, below, above, ...
  const std::string out = bs::to_nfc(text);
  CHECK(out.substr(0, 3) == "\xE1\xBA\xAD");
  CHECK(out.size() == 3 + 4 * 100000 - 4);
}
