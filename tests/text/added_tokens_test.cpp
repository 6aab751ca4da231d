// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/added_tokens.hpp>

#include <support/catch.hpp>

#include <string>
#include <vector>

namespace bs = block_streamer;

namespace {
bs::AddedToken token(std::string content, std::int32_t id) {
  bs::AddedToken added;
  added.content = std::move(content);
  added.id = id;
  return added;
}

std::vector<std::string> pieces(const bs::AddedTokens& tokens, std::string_view text) {
  std::vector<std::string> out;
  tokens.split(text, [&](std::string_view piece, std::optional<std::int32_t> id) {
    out.push_back((id ? std::to_string(*id) + ":" : "") + std::string{piece});
  });
  return out;
}
using Pieces = std::vector<std::string>;
}  // namespace

TEST_CASE("the leftmost token counts, of those the longest") {
  const bs::AddedTokens tokens{{token("ab", 1), token("abc", 2), token("bcd", 3)}};
  CHECK(pieces(tokens, "xabcdab") == Pieces{"x", "2:abc", "d", "1:ab"});
  CHECK(pieces(tokens, "bcdabd") == Pieces{"3:bcd", "1:ab", "d"});
  CHECK(pieces(tokens, "").empty());
  CHECK(pieces(bs::AddedTokens{}, "abc") == Pieces{"abc"});
}

TEST_CASE("stripping tokens take white space along, word tokens stand alone") {
  auto left = token("<l>", 1), right = token("<r>", 2), word = token("wo", 3);
  left.lstrip = right.rstrip = word.single_word = true;
  const bs::AddedTokens tokens{{left, right, word}};
  CHECK(pieces(tokens, "a \u3000<l> b") == Pieces{"a", "1: \u3000<l>", " b"});
  CHECK(pieces(tokens, "<r>  <l>") == Pieces{"2:<r>  ", "1:<l>"});
  CHECK(pieces(tokens, "wo wow éwo (wo)") == Pieces{"3:wo", " wow éwo (", "3:wo", ")"});
}
