// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/traffic.hpp>
#include <block_streamer/plan/visit_order.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <random>

#include "plan_checks.hpp"

namespace bs = block_streamer;
using support::check_plan;

namespace {

/// The fewest fetches any replacement could make, with the parts of the last `ahead` visits
/// protected.
std::uint32_t fewest_fetches(const bs::VisitOrder& order, const bs::SlotContents& slots,
                             std::uint32_t ahead) {
  using Key = std::pair<std::size_t, std::vector<std::uint32_t>>;
  std::map<Key, std::uint32_t> memo;
  std::function<std::uint32_t(std::size_t, std::vector<std::uint32_t>)> best =
      [&](std::size_t visit, std::vector<std::uint32_t> held) -> std::uint32_t {
    if (visit == order.size()) return 0;
    std::sort(held.begin(), held.end());
    const Key key{visit, held};
    if (const auto found = memo.find(key); found != memo.end()) return found->second;
    const auto part = static_cast<std::uint32_t>(bs::index_of(order[visit].block));
    std::uint32_t result = ~0U;
    if (std::find(held.begin(), held.end(), part) != held.end()) {
      result = best(visit + 1, held);
    } else {
      for (std::size_t s = 0; s < held.size(); ++s) {
        bool recent = false;
        for (std::size_t back = 1; back <= ahead && back <= visit; ++back) {
          recent = recent || bs::index_of(order[visit - back].block) == held[s];
        }
        if (recent) continue;
        auto next = held;
        next[s] = part;
        result = std::min(result, 1 + best(visit + 1, next));
      }
    }
    return memo[key] = result;
  };
  std::vector<std::uint32_t> held;
  for (std::size_t s = 0; s < slots.size(); ++s) {
    held.push_back(slots[s] ? static_cast<std::uint32_t>(bs::index_of(slots[s]->block))
                            : 1000U + static_cast<std::uint32_t>(s));
  }
  return best(0, held);
}

}  // namespace

TEST_CASE("a first pass fetches every block once, at any depth") {
  for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
    const bs::SlotContents empty(ahead + 1);
    const auto order = bs::ascending(0, 8);
    const auto plan = bs::plan_pass(order, {}, empty, {.prefetch_ahead = ahead});
    CHECK(plan.fetches.size() == 8);
    check_plan(plan, empty, ahead);
    for (std::size_t i = 0; i < 8; ++i) {
      CHECK(plan.fetches[i].after_visits == (i > ahead ? i - ahead : 0));
    }
  }
}

TEST_CASE("at the turn the last blocks of the forward are not fetched again") {
  const std::size_t n = 36;
  for (const std::uint32_t slots : {2U, 3U, 18U, 36U}) {
    const std::uint32_t ahead = slots == 3 ? 2 : 1;
    bs::SlotContents residency(slots);
    const auto forward = bs::ascending(0, n), backward = bs::descending(0, n);
    std::size_t fetched = 0;
    for (int step = 0; step < 4; ++step) {
      fetched = 0;
      for (const bool is_forward : {true, false}) {
        const auto& order = is_forward ? forward : backward;
        const auto hint =
            is_forward ? bs::joined(backward, forward) : bs::joined(forward, backward);
        const auto plan = bs::plan_pass(order, hint, residency, {.prefetch_ahead = ahead});
        check_plan(plan, residency, ahead);
        fetched += plan.fetches.size();
        residency = plan.residency;
      }
    }
    INFO(slots << " slots");
    CHECK(fetched == bs::training_step_fetches(n, slots));  // 68 with two slots, 36 with eighteen
  }
}

TEST_CASE("repeated forwards keep what does not pass through") {
  const std::size_t n = 30;
  for (const std::uint32_t ahead : {0U, 1U, 2U}) {
    for (const std::uint32_t slots : {ahead + 1, ahead + 5, 29U, 30U}) {
      bs::SlotContents residency(slots);
      const auto order = bs::ascending(0, n);
      std::size_t fetched = 0;
      for (int pass = 0; pass < 6; ++pass) {
        const auto plan =
            bs::plan_pass(order, bs::joined(order, order), residency, {.prefetch_ahead = ahead});
        check_plan(plan, residency, ahead);
        fetched = plan.fetches.size();
        residency = plan.residency;
      }
      INFO(slots << " slots, ahead " << ahead);
      CHECK(fetched <= bs::most_repeated_forward_fetches(n, slots, ahead));
      CHECK(fetched >= n - slots);
      if (slots == ahead + 1) CHECK(fetched == n);
    }
  }
}

TEST_CASE("half trainable: 64 blocks, 32 slots, LoRA on the top half") {
  // DESIGN: 32 + 1 + prefetch_ahead reads a step in steady state; LRU makes 64, no cache 96.
  for (const std::uint32_t ahead : {0U, 1U, 2U}) {
    bs::SlotContents residency(32);
    const auto forward = bs::ascending(0, 64), backward = bs::descending(32, 64);
    std::size_t fetched = 0;
    for (int step = 0; step < 6; ++step) {
      const auto down = bs::plan_pass(forward, bs::joined(backward, forward), residency,
                                      {.prefetch_ahead = ahead});
      const auto up = bs::plan_pass(backward, bs::joined(forward, backward), down.residency,
                                    {.prefetch_ahead = ahead});
      fetched = down.fetches.size() + up.fetches.size();
      residency = up.residency;
    }
    INFO("ahead " << ahead);
    CHECK(fetched <= 33 + ahead);
  }
}

TEST_CASE("a wrong hint costs traffic only") {
  std::mt19937 random{3};
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t ahead = random() % 3, slots = ahead + 1 + random() % 4;
    bs::SlotContents residency(slots);
    for (int pass = 0; pass < 4; ++pass) {
      bs::VisitOrder order, hint;
      for (std::uint32_t i = random() % 12; i-- > 0;) order.push_back({bs::block_at(random() % 7)});
      for (std::uint32_t i = random() % 12; i-- > 0;) hint.push_back({bs::block_at(random() % 7)});
      const auto plan = bs::plan_pass(order, hint, residency, {.prefetch_ahead = ahead});
      check_plan(plan, residency, ahead);
      residency = plan.residency;
    }
  }
}

TEST_CASE("farthest next use is optimal against brute force") {
  std::mt19937 random{11};
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t ahead = random() % 3, slots = ahead + 1 + random() % 3;
    bs::VisitOrder order;
    for (std::uint32_t i = 1 + random() % 9; i-- > 0;)
      order.push_back({bs::block_at(random() % 6)});
    const bs::SlotContents empty(slots);
    const auto plan =
        bs::plan_pass(order, {}, empty, {.prefetch_ahead = ahead, .prefetch_next_pass = false});
    check_plan(plan, empty, ahead);
    CHECK(plan.fetches.size() == fewest_fetches(order, empty, ahead));
  }
}

TEST_CASE("too few slots are refused") {
  CHECK_THROWS_AS(
      bs::plan_pass(bs::ascending(0, 3), {}, bs::SlotContents(1), {.prefetch_ahead = 1}),
      bs::ContractViolation);
}
