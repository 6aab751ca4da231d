// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/plan/repeated_plan.hpp>
#include <block_streamer/plan/slot_sizes.hpp>
#include <block_streamer/plan/visit_order.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <random>

#include "plan_checks.hpp"

namespace bs = block_streamer;

namespace {

std::size_t kept_count(const bs::RepeatedPlan& plan) {
  return static_cast<std::size_t>(
      std::ranges::count_if(plan.kept, [](const auto& part) { return part.has_value(); }));
}

/// Everything that the plan begins with is there again at its end, from whatever else lay in the
/// slots, and nothing that is kept is fetched.
void check_repeats(const bs::RepeatedPlan& plan, std::uint32_t ahead) {
  support::check_plan(plan.plan, plan.kept, ahead);
  for (std::size_t slot = 0; slot < plan.kept.size(); ++slot) {
    if (plan.kept[slot]) CHECK(plan.plan.residency[slot] == plan.kept[slot]);
  }
  CHECK(plan.plan.fetches.size() + kept_count(plan) == plan.plan.visits.size());
  CHECK(plan.plan.next_pass_fetches == 0);
}

/// Visits of the way there and back are blocks and blocks - last.
std::size_t expected_count(const bs::RepeatedPlan& plan, std::size_t last) {
  return (plan.plan.visits.size() + last) / 2;
}

/// The same of one that goes through all blocks and back down to `last`.
void check_returns(const bs::RepeatedPlan& plan, std::size_t last, std::uint32_t ahead) {
  support::check_plan(plan.plan, plan.begins, ahead);
  std::vector<std::size_t> visited;
  for (const bs::PlannedVisit& visit : plan.plan.visits)
    visited.push_back(bs::index_of(visit.part.block));
  std::vector<std::size_t> expected;
  for (const auto& order : {bs::ascending(0, expected_count(plan, last)),
                            bs::descending(last, expected_count(plan, last))}) {
    for (const bs::PartId part : order) expected.push_back(bs::index_of(part.block));
  }
  CHECK(visited == expected);
  for (std::size_t slot = 0; slot < plan.begins.size(); ++slot) {
    if (plan.begins[slot]) CHECK(plan.plan.residency[slot] == plan.begins[slot]);
    if (plan.kept[slot]) CHECK(plan.begins[slot] == plan.kept[slot]);
  }
  for (const bs::PlannedFetch& fetch : plan.plan.fetches) CHECK_FALSE(plan.kept[fetch.slot]);
  CHECK(std::ranges::is_sorted(plan.plan.fetches, {}, &bs::PlannedFetch::after_visits));
}

}  // namespace

TEST_CASE("a repeated plan keeps a part in every slot beyond those on their way") {
  for (std::size_t blocks = 1; blocks <= 12; ++blocks) {
    for (std::uint32_t slots = 1; slots <= blocks; ++slots) {
      for (std::uint32_t ahead = 0; ahead < slots; ++ahead) {
        const auto plan = bs::plan_repeated(bs::ascending(0, blocks), bs::SlotSpace{slots}, ahead);
        INFO(blocks << " blocks, " << slots << " slots, ahead " << ahead);
        check_repeats(plan, ahead);
        CHECK(kept_count(plan) == (slots == blocks ? blocks : slots - ahead - 1));
      }
    }
  }
}

TEST_CASE("what a repeated plan keeps is spread over the order, from its first visit on") {
  const auto plan = bs::plan_repeated(bs::ascending(0, 12), bs::SlotSpace{6}, 1);
  std::vector<std::size_t> kept;
  for (const auto& part : plan.kept) {
    if (part) kept.push_back(bs::index_of(part->block));
  }
  std::ranges::sort(kept);
  CHECK(kept == std::vector<std::size_t>{0, 3, 6, 9});
}

TEST_CASE("repeated plans of unlike blocks keep what fits into the slots that were made") {
  std::mt19937 random{5};
  for (int round = 0; round < 300; ++round) {
    std::vector<std::uint64_t> blocks(1 + random() % 12);
    for (std::uint64_t& bytes : blocks) bytes = 256 * (1 + random() % 20);
    const auto ahead = static_cast<std::uint32_t>(random() % blocks.size());
    const auto slots = bs::choose_slot_sizes(blocks, ahead, 256 * (random() % 100));
    const bs::SlotSpace space{slots, blocks};
    const auto plan = bs::plan_repeated(bs::ascending(0, blocks.size()), space, ahead);
    check_repeats(plan, ahead);
    for (const bs::PlannedVisit& visit : plan.plan.visits)
      CHECK(space.fits(visit.slot, visit.part));
    CHECK(kept_count(plan) >= slots.size() - ahead - 1);
  }
}

TEST_CASE("a plan that returns finds on either way what the other left in the slots") {
  for (std::size_t blocks = 1; blocks <= 12; ++blocks) {
    for (std::uint32_t slots = 1; slots <= blocks; ++slots) {
      for (std::uint32_t ahead = 0; ahead < slots; ++ahead) {
        for (std::size_t last = 0; last <= blocks; ++last) {
          const auto plan =
              bs::plan_repeated_return(bs::ascending(0, blocks), last, bs::SlotSpace{slots}, ahead);
          INFO(blocks << " blocks, " << slots << " slots, ahead " << ahead << ", to " << last);
          check_returns(plan, last, ahead);
          CHECK(kept_count(plan) == (slots == blocks ? blocks : slots - ahead - 1));
          if (last == 0) CHECK(plan.plan.fetches.size() == 2 * (blocks - slots));
        }
      }
    }
  }
}

TEST_CASE("a plan that returns goes by the places that were made for unlike blocks") {
  std::mt19937 random{6};
  for (int round = 0; round < 300; ++round) {
    std::vector<std::uint64_t> blocks(1 + random() % 12);
    for (std::uint64_t& bytes : blocks) bytes = 256 * (1 + random() % 20);
    const auto ahead = static_cast<std::uint32_t>(random() % blocks.size());
    const auto slots = bs::choose_slot_sizes(blocks, ahead, 256 * (random() % 100));
    const bs::SlotSpace space{slots, blocks};
    const std::size_t last = random() % (blocks.size() + 1);
    const auto plan = bs::plan_repeated_return(bs::ascending(0, blocks.size()), last, space, ahead);
    check_returns(plan, last, ahead);
    for (const bs::PlannedVisit& visit : plan.plan.visits)
      CHECK(space.fits(visit.slot, visit.part));
  }
}

TEST_CASE("a repeated plan needs slots for what is on its way") {
  CHECK_THROWS_AS(bs::plan_repeated(bs::ascending(0, 4), bs::SlotSpace{2}, 2),
                  bs::ContractViolation);
}
