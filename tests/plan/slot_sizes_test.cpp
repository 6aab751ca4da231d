// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/plan/slot_sizes.hpp>
#include <block_streamer/plan/spread.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <numeric>
#include <random>

namespace bs = block_streamer;
using Sizes = std::vector<std::uint64_t>;

TEST_CASE("equal blocks give equal slots") {
  const Sizes blocks(10, 1024);
  CHECK(bs::choose_slot_sizes(blocks, 1, 0) == Sizes(2, 1024));
  CHECK(bs::choose_slot_sizes(blocks, 1, 4 * 1024 + 1000) == Sizes(6, 1024));
  CHECK(bs::choose_slot_sizes(blocks, 2, 1 << 20) == Sizes(10, 1024));
  CHECK(bs::choose_slot_sizes(Sizes{77}, 0, 0) == Sizes{77});
}

TEST_CASE("a large block does not make the slots of small ones large") {
  Sizes blocks(10, 1024);
  blocks.push_back(8192);
  const Sizes slots = bs::choose_slot_sizes(blocks, 1, 5 * 1024);
  CHECK(slots == Sizes{8192, 8192, 1024, 1024, 1024, 1024, 1024});
  // With room for all of them every block has its slot.
  const Sizes all = bs::choose_slot_sizes(blocks, 1, 1 << 20);
  CHECK(all.size() == blocks.size());
}

TEST_CASE("blocks that differ little share a class") {
  const Sizes slots = bs::choose_slot_sizes(Sizes{1000, 950, 900, 880, 500}, 0, 2000);
  CHECK(slots == Sizes{1000, 1000, 1000});
}

TEST_CASE("slots for cached blocks stay within the budget") {
  std::mt19937 random{2};
  for (int round = 0; round < 500; ++round) {
    Sizes blocks;
    for (std::uint32_t i = 2 + random() % 12; i-- > 0;) blocks.push_back(1 + random() % 5000);
    const std::uint32_t ahead = random() % std::min<std::uint32_t>(3, blocks.size());
    const std::uint64_t budget = random() % 20000;
    const Sizes slots = bs::choose_slot_sizes(blocks, ahead, budget);
    const std::uint64_t largest = *std::max_element(blocks.begin(), blocks.end());
    CHECK(std::count(slots.begin(), slots.end(), largest) > ahead);
    CHECK(slots.size() <= blocks.size());
    CHECK(std::accumulate(slots.begin(), slots.end(), std::uint64_t{0}) <=
          (ahead + 1) * largest + budget);
  }
}

TEST_CASE("what is kept is spread evenly") {
  for (const std::size_t n : {7U, 64U, 100U}) {
    for (std::size_t k = 1; k <= n; ++k) {
      const auto chosen = bs::spread_in_budget(Sizes(n, 100), k * 100 + 50);
      CAPTURE(n, k);
      REQUIRE(static_cast<std::size_t>(std::count(chosen.begin(), chosen.end(), 1)) == k);
      // The longest run of others, around the end, is as short as it can be, or one longer.
      std::size_t run = 0, longest = 0;
      for (std::size_t i = 0; i < 2 * n; ++i) {
        run = chosen[i % n] != 0 ? 0 : run + 1;
        longest = std::max(longest, run);
      }
      CHECK(longest <= (n - k + k - 1) / k + 1);
    }
  }
}

TEST_CASE("a budget is filled nearly as well as it can be") {
  std::mt19937 random{9};
  double worst = 0, sum = 0;
  int rounds = 0;
  for (int round = 0; round < 400; ++round) {
    Sizes sizes;
    for (std::uint32_t i = 6 + random() % 7; i-- > 0;) sizes.push_back(50 + random() % 200);
    const std::uint64_t total = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
    const std::uint64_t budget = 50 + random() % total;
    std::uint64_t fullest = 0;
    for (std::uint32_t set = 0; set < 1U << sizes.size(); ++set) {
      std::uint64_t bytes = 0;
      for (std::size_t i = 0; i < sizes.size(); ++i) bytes += (set >> i & 1U) != 0 ? sizes[i] : 0;
      if (bytes <= budget) fullest = std::max(fullest, bytes);
    }
    const auto chosen = bs::spread_in_budget(sizes, budget);
    std::uint64_t taken = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) taken += chosen[i] != 0 ? sizes[i] : 0;
    REQUIRE(taken <= budget);
    if (fullest == 0) continue;
    const double gap = 1 - static_cast<double>(taken) / static_cast<double>(fullest);
    worst = std::max(worst, gap);
    sum += gap;
    ++rounds;
  }
  WARN("filling a budget: " << 100 * sum / rounds << " % below brute force on average, "
                            << 100 * worst << " % at most");
  CHECK(sum / rounds < 0.02);
  CHECK(worst < 0.35);
}

TEST_CASE("nothing is kept in too small a budget, everything in a large one") {
  const Sizes sizes{5, 6, 7};
  CHECK(bs::spread_in_budget(sizes, 4) == std::vector<std::uint8_t>{0, 0, 0});
  CHECK(bs::spread_in_budget(sizes, 18) == std::vector<std::uint8_t>{1, 1, 1});
  CHECK(bs::spread_in_budget({}, 18).empty());
}
