// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/error.hpp>
#include <block_streamer/text/packing.hpp>
#include <block_streamer/text/shuffled_order.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace bs = block_streamer;

namespace {

using Packs = std::vector<std::vector<std::size_t>>;

bs::TextRow row_of(std::int32_t first, std::size_t length) {
  bs::TextRow row;
  for (std::size_t t = 0; t < length; ++t) {
    row.tokens.push_back(first + static_cast<std::int32_t>(t));
    row.trained.push_back(t > 0);
  }
  return row;
}

}  // namespace

TEST_CASE("each row goes into the fullest pack that takes it, the longest first") {
  CHECK(bs::pack_by_length(std::vector<std::size_t>{4, 8, 1, 4, 2, 1}, 10) ==
        Packs{{0, 2, 3, 5}, {1, 4}});
  // First fit would put the 3 beside the 6 and need a third pack for the 4.
  CHECK(bs::pack_by_length(std::vector<std::size_t>{6, 7, 3, 4}, 10) == Packs{{0, 3}, {1, 2}});
  CHECK(bs::pack_by_length({}, 10).empty());
  CHECK(bs::pack_by_length(std::vector<std::size_t>{10, 10}, 10) == Packs{{0}, {1}});
}

TEST_CASE("packs hold every row once, none above the capacity, close to the fewest there can be") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<std::size_t> lengths = bs::shuffled_order(400, seed);
    for (std::size_t& length : lengths) length = 1 + length % 97;
    const Packs packs = bs::pack_by_length(lengths, 100);
    std::vector<std::size_t> seen;
    for (const auto& pack : packs) {
      std::size_t tokens = 0;
      for (const std::size_t row : pack) tokens += lengths[row];
      CHECK(tokens <= 100);
      CHECK(std::is_sorted(pack.begin(), pack.end()));
      seen.insert(seen.end(), pack.begin(), pack.end());
    }
    CHECK(std::is_sorted(packs.begin(), packs.end()));
    std::sort(seen.begin(), seen.end());
    std::vector<std::size_t> all(lengths.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    CHECK(seen == all);
    const std::size_t total = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
    CHECK(packs.size() <= (total + 99) / 100 * 103 / 100);
  }
}

TEST_CASE("a packed row says where its sequences begin and keeps what is trained of them") {
  const std::vector<bs::TextRow> rows{row_of(10, 3), row_of(20, 5), row_of(30, 2)};
  const auto packed = bs::pack_rows(rows, 6);
  REQUIRE(packed.size() == 2);
  CHECK(packed[0].tokens == std::vector<std::int32_t>{10, 11, 12, 30, 31});
  CHECK(packed[0].trained == std::vector<std::uint8_t>{0, 1, 1, 0, 1});
  CHECK(packed[0].sequences == std::vector<std::uint32_t>{3, 2});
  CHECK(packed[1].tokens == rows[1].tokens);
  CHECK(packed[1].sequences == std::vector<std::uint32_t>{5});
  CHECK_THROWS_AS(bs::pack_rows(rows, 4), bs::ContractViolation);
  CHECK_THROWS_AS(bs::pack_rows(packed, 8), bs::ContractViolation);
}
