// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/error.hpp>
#include <block_streamer/text/row_split.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bs = block_streamer;

namespace {

std::vector<bs::TextRow> numbered(std::size_t count) {
  std::vector<bs::TextRow> rows;
  for (std::size_t i = 0; i < count; ++i)
    rows.push_back({{static_cast<std::int32_t>(i), 0}, {0, 1}});
  return rows;
}

std::vector<std::int32_t> numbers(const std::vector<bs::TextRow>& rows) {
  std::vector<std::int32_t> all;
  for (const bs::TextRow& row : rows) all.push_back(row.tokens.at(0));
  return all;
}

}  // namespace

TEST_CASE("every row trains or is held out, in the order in which they stood") {
  for (const std::size_t count : {std::size_t{2}, std::size_t{3}, std::size_t{100}}) {
    const bs::RowSplit split = bs::hold_out_rows(numbered(count), 0.1, 7);
    const auto training = numbers(split.training), held_out = numbers(split.held_out);
    CHECK(std::ranges::is_sorted(training));
    CHECK(std::ranges::is_sorted(held_out));
    std::vector<std::int32_t> all;
    std::ranges::merge(training, held_out, std::back_inserter(all));
    CHECK(all == numbers(numbered(count)));
  }
}

TEST_CASE("as many rows are held out as the share says, at least one and not all") {
  const auto held_out = [](std::size_t count, double fraction) {
    return bs::hold_out_rows(numbered(count), fraction, 0).held_out.size();
  };
  CHECK(held_out(100, 0.07) == 7);  // 0.07 * 100 is a little more than 7
  CHECK(held_out(10, 0.25) == 3);
  CHECK(held_out(5, 0.001) == 1);
  CHECK(held_out(5, 0.999) == 4);
}

TEST_CASE("which rows are held out follows from the seed") {
  const auto with = [](std::uint64_t seed) {
    return numbers(bs::hold_out_rows(numbered(200), 0.1, seed).held_out);
  };
  CHECK(with(3) == with(3));
  CHECK(with(3) != with(4));
}

TEST_CASE("a split that leaves nothing is a caller's mistake") {
  CHECK_THROWS_AS(bs::hold_out_rows(numbered(1), 0.5, 0), bs::ContractViolation);
  CHECK_THROWS_AS(bs::hold_out_rows(numbered(5), 0, 0), bs::ContractViolation);
  CHECK_THROWS_AS(bs::hold_out_rows(numbered(5), 1, 0), bs::ContractViolation);
}
