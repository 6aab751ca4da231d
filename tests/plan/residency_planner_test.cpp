// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/plan/pass_timeline.hpp>
#include <block_streamer/plan/residency_planner.hpp>
#include <block_streamer/plan/slot_sizes.hpp>
#include <block_streamer/plan/traffic.hpp>
#include <block_streamer/plan/visit_order.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <optional>
#include <random>

#include "plan_checks.hpp"

namespace bs = block_streamer;
using support::check_plan;
using support::equal_costs;

namespace {

/// Repeats a step of one pass or two, as a streamer would: each pass is hinted what follows it.
class Steps {
 public:
  Steps(bs::ResidencyPlanner planner, bs::PassCosts costs, std::uint32_t slots, std::uint32_t ahead,
        std::vector<bs::VisitOrder> passes)
      : planner_{std::move(planner)},
        timeline_{std::move(costs)},
        ahead_{ahead},
        passes_{std::move(passes)},
        residency(slots) {}

  void step() {
    fetches = 0;
    seconds = 0;
    for (std::size_t p = 0; p < passes_.size(); ++p) {
      const auto& own = passes_[p];
      const auto& other = passes_[passes_.size() - 1 - p];
      const auto plan = planner_.plan(own, bs::joined(other, own), residency);
      check_plan(plan, residency, ahead_);
      fetches += plan.fetches.size();
      seconds += timeline_.run(plan);
      residency = plan.residency;
    }
  }
  [[nodiscard]] bs::StepCost expected() {
    bs::VisitOrder all;
    for (const auto& pass : passes_) all = bs::joined(all, pass);
    return planner_.expected(bs::VisitCycle{all}).value();
  }

 private:
  bs::ResidencyPlanner planner_;
  bs::PassTimeline timeline_;
  std::uint32_t ahead_;
  std::vector<bs::VisitOrder> passes_;

 public:
  bs::SlotContents residency;
  std::size_t fetches = 0;  ///< of the latest step
  double seconds = 0;
};

Steps equal_steps(std::uint32_t blocks, std::uint32_t slots, bs::PlanOptions options,
                  std::optional<bs::BlockCost> cost, std::vector<bs::VisitOrder> passes) {
  std::optional<bs::PassCosts> costs;
  if (cost) costs = equal_costs(blocks, *cost);
  return {bs::ResidencyPlanner{bs::SlotSpace{slots}, options, costs},
          equal_costs(blocks, cost.value_or(bs::BlockCost{1, 0, 1})), slots, options.prefetch_ahead,
          std::move(passes)};
}

bs::SlotContents sorted(bs::SlotContents contents) {
  std::sort(contents.begin(), contents.end());
  return contents;
}

}  // namespace

TEST_CASE("64 blocks, 32 slots, the top half trains: 33 + prefetch_ahead reads a step") {
  // Read time is what counts. LRU makes 64, no cache 96.
  for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
    for (const bool costs : {false, true}) {
      std::optional<bs::BlockCost> cost;
      if (costs) cost = bs::BlockCost{1000, 1, 1};
      Steps steps = equal_steps(64, 32, {.prefetch_ahead = ahead}, cost,
                                {bs::ascending(0, 64), bs::descending(32, 64)});
      for (int step = 0; step < 6; ++step) steps.step();
      WARN("ahead " << ahead << (costs ? ", with costs: " : ", without: ") << steps.fetches
                    << " reads a step");
      CHECK(steps.fetches <= 33 + ahead);
    }
  }
}

TEST_CASE("knowing costs, streamed blocks are spread where that is faster") {
  // A fetch takes two visits; 18 of 32 blocks stay. The fewest fetches alone leave the link idle
  // while it passes over what is resident.
  const std::vector<bs::VisitOrder> passes{bs::ascending(0, 32)};
  const bs::BlockCost cost{2, 0, 1};
  Steps spread = equal_steps(32, 18, {}, cost, passes);
  double least = 1e9;
  bs::PassTimeline timeline{equal_costs(32, cost)};
  bs::ResidencyPlanner by_count{bs::SlotSpace{18}, {}};
  bs::SlotContents residency(18);
  for (int step = 0; step < 8; ++step) {
    spread.step();
    const auto plan = by_count.plan(passes[0], bs::joined(passes[0], passes[0]), residency);
    residency = plan.residency;
    least = std::min(least, timeline.run(plan));
  }
  WARN("32 blocks, 18 slots: " << spread.seconds << " s with costs, at least " << least
                               << " s by count, bound 32 s");
  CHECK(spread.seconds == Approx(32));
  CHECK(spread.seconds == Approx(spread.expected().seconds));
  CHECK(least > 40);
}

TEST_CASE("steady steps end as they began, and cost what was expected") {
  int shapes = 0, warm_up = 0, longest_period = 0;
  for (const double read : {0.5, 1.0, 2.0, 20.0}) {
    for (std::uint32_t n = 2; n <= 9; ++n) {
      for (std::uint32_t ahead = 0; ahead <= 2 && ahead + 1 < n; ++ahead) {
        for (std::uint32_t slots = ahead + 1; slots <= n; ++slots) {
          for (std::uint32_t lowest = 0; lowest <= n; lowest += 2) {
            for (const bool prefetch : {false, true}) {
              std::vector<bs::VisitOrder> passes{bs::ascending(0, n)};
              if (lowest < n) passes.push_back(bs::descending(lowest, n));
              Steps steps =
                  equal_steps(n, slots, {.prefetch_ahead = ahead, .prefetch_next_pass = prefetch},
                              bs::BlockCost{read, 0.25, 1}, passes);
              std::vector<bs::SlotContents> ends{steps.residency};
              std::size_t most_fetches = 0;
              double seconds = 0;
              for (int step = 0; step < 13; ++step) {
                steps.step();
                ends.push_back(steps.residency);
                if (step >= 3) most_fetches = std::max(most_fetches, steps.fetches);
                if (step >= 7) seconds += steps.seconds / 6;
              }
              CAPTURE(n, ahead, slots, lowest, prefetch, read);
              int first = static_cast<int>(ends.size()) - 1;
              while (first > 0 && sorted(ends[first - 1]) == sorted(ends.back())) --first;
              REQUIRE(first <= 3);  // what is resident no longer changes
              CHECK(most_fetches <= steps.expected().fetches);
              // Without fetches across the border of passes, places repeat too. With them, the
              // slots that blocks pass through go round: three blocks cannot take turns in two
              // slots any other way.
              int period = 1;
              while (ends[ends.size() - 1 - static_cast<std::size_t>(period)] != ends.back())
                REQUIRE(++period <= static_cast<int>(slots));
              if (!prefetch) CHECK(period == 1);
              if (prefetch && ahead > 0) CHECK(seconds <= steps.expected().seconds * (1 + 1e-9));
              ++shapes;
              warm_up = std::max(warm_up, first);
              longest_period = std::max(longest_period, period);
            }
          }
        }
      }
    }
  }
  WARN(shapes << " shapes: the same blocks are resident after at most " << warm_up
              << " steps; places repeat after at most " << longest_period
              << " (after each step without fetches across passes)");
}

TEST_CASE("blocks of different sizes: every plan keeps to what fits, steady steps repeat") {
  std::mt19937 random{23};
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t n = 3 + random() % 9, ahead = random() % 3;
    if (ahead + 1 >= n) continue;
    std::vector<std::uint64_t> sizes;
    bs::PassCosts costs;
    for (std::uint32_t b = 0; b < n; ++b) {
      sizes.push_back(256 * (1 + random() % 5));
      costs.blocks.push_back({static_cast<double>(sizes.back()) / 500, 0, 1});
    }
    const auto slots = bs::choose_slot_sizes(sizes, ahead, random() % (256 * 3 * n));
    std::optional<bs::PassCosts> known;
    if (round % 2 == 0) known = costs;
    Steps steps{bs::ResidencyPlanner{bs::SlotSpace{slots, sizes},
                                     {.prefetch_ahead = ahead, .prefetch_next_pass = false},
                                     known},
                costs,
                static_cast<std::uint32_t>(slots.size()),
                ahead,
                {bs::ascending(0, n)}};
    bs::SlotContents before;
    for (int step = 0; step < 12; ++step) {
      before = steps.residency;
      steps.step();
      for (std::size_t s = 0; s < slots.size(); ++s) {
        if (steps.residency[s]) REQUIRE(sizes[bs::index_of(steps.residency[s]->block)] <= slots[s]);
      }
    }
    if (known) {
      CHECK(before == steps.residency);
      CHECK(steps.fetches <= steps.expected().fetches);
    }
  }
}

TEST_CASE("with costs too a wrong hint costs traffic only") {
  std::mt19937 random{3};
  for (int round = 0; round < 400; ++round) {
    const std::uint32_t ahead = random() % 3, slots = ahead + 1 + random() % 4;
    bs::ResidencyPlanner planner{
        bs::SlotSpace{slots}, {.prefetch_ahead = ahead}, equal_costs(7, {1.5, 0, 1})};
    bs::SlotContents residency(slots);
    bs::VisitOrder order;
    for (int pass = 0; pass < 5; ++pass) {
      if (pass % 2 == 0) {  // otherwise the same again, with another hint
        order.clear();
        for (std::uint32_t i = random() % 9; i-- > 0;)
          order.push_back({bs::block_at(random() % 7)});
      }
      bs::VisitOrder hint;
      for (std::uint32_t i = random() % 5; i-- > 0;) hint.push_back({bs::block_at(random() % 7)});
      if (random() % 2 == 0) hint = bs::joined(hint, order);
      const auto plan = planner.plan(order, hint, residency);
      check_plan(plan, residency, ahead);
      residency = plan.residency;
    }
  }
}

TEST_CASE("what a planner was not told is refused") {
  CHECK_THROWS_AS((bs::ResidencyPlanner{bs::SlotSpace{1}, {.prefetch_ahead = 1}}),
                  bs::ContractViolation);
  // Two slots, but only one takes the larger block.
  CHECK_THROWS_AS(
      (bs::ResidencyPlanner{bs::SlotSpace{{512, 256}, {512, 256, 256}}, {.prefetch_ahead = 1}}),
      bs::ContractViolation);
  CHECK_THROWS_AS((bs::SlotSpace{{256}, {512}}), bs::ContractViolation);
  bs::ResidencyPlanner planner{bs::SlotSpace{2}, {}};
  CHECK_THROWS_AS(planner.plan(bs::ascending(0, 3), {}, bs::SlotContents(3)),
                  bs::ContractViolation);
}
