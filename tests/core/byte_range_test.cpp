// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/byte_range.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
constexpr std::uint64_t top = std::numeric_limits<std::uint64_t>::max();

TEST_CASE("checked arithmetic refuses what 64 bits do not hold") {
  CHECK(bs::checked_add(1, 2) == 3U);
  CHECK(bs::checked_add(top - 1, 1) == top);
  CHECK_FALSE(bs::checked_add(top, 1).has_value());
  CHECK(bs::checked_multiply(0, top) == 0U);
  CHECK(bs::checked_multiply(top, 0) == 0U);
  CHECK(bs::checked_multiply(1ULL << 32, (1ULL << 32) - 1).has_value());
  CHECK_FALSE(bs::checked_multiply(1ULL << 32, 1ULL << 32).has_value());
}

TEST_CASE("rounding works for any granularity") {
  CHECK(bs::round_down(4097, 4096) == 4096);
  CHECK(bs::round_up(4097, 4096) == 8192);
  CHECK(bs::round_up(4096, 4096) == 4096);
  CHECK(bs::round_up(0, 512) == 0);
  CHECK(bs::round_up(7, 3) == 9);
}
