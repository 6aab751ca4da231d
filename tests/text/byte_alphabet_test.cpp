// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/byte_alphabet.hpp>

#include <support/catch.hpp>

#include <set>

namespace bs = block_streamer;

TEST_CASE("the alphabet spells every byte differently and reads it back") {
  std::string all, spelled, back;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  bs::append_as_characters(spelled, all);
  bs::append_as_bytes(back, spelled);
  CHECK(back == all);
  CHECK(std::set<std::uint16_t>(bs::byte_alphabet.character.begin(),
                                bs::byte_alphabet.character.end())
            .size() == 256);
  std::string space;
  bs::append_as_characters(space, " \n");
  CHECK(space == "ĠĊ");
}

TEST_CASE("a token with a foreign character stands for itself") {
  std::string out = "x";
  bs::append_as_bytes(out, "Ġ中");
  CHECK(out == "xĠ中");
}
