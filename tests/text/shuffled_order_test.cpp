// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/text/shuffled_order.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <vector>

namespace bs = block_streamer;

TEST_CASE("an order is a permutation fixed by its seed on every platform") {
  const auto order = bs::shuffled_order(1000, 42);
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) REQUIRE(sorted[i] == i);
  CHECK(order == bs::shuffled_order(1000, 42));
  CHECK(order != bs::shuffled_order(1000, 43));
  CHECK(bs::shuffled_order(8, 1) == std::vector<std::size_t>{4, 3, 2, 7, 5, 6, 0, 1});
  CHECK(bs::shuffled_order(0, 1).empty());
  CHECK(bs::shuffled_order(1, 1) == std::vector<std::size_t>{0});
}

TEST_CASE("every place is equally likely for every element") {
  std::size_t counts[3][3] = {};
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    const auto order = bs::shuffled_order(3, seed);
    for (std::size_t i = 0; i < 3; ++i) ++counts[order[i]][i];
  }
  for (const auto& row : counts) {
    for (const std::size_t count : row) CHECK((count > 880 && count < 1120));
  }
}
