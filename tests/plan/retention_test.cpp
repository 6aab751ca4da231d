// SPDX-License-Identifier: Apache-2.0
// What stays resident in a step, against every other choice there is.
#include <block_streamer/plan/retention.hpp>
#include <block_streamer/plan/slot_sizes.hpp>
#include <block_streamer/plan/visit_order.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <random>
#include <string>

#include "plan_checks.hpp"

namespace bs = block_streamer;
using support::equal_costs;

namespace {

/// Tries every victim at every fetch of a step, from every residency that the step leaves as it
/// found it. Knows nothing of retentions, queues or slots: parts are evicted by name.
class EveryStep {
 public:
  EveryStep(const bs::VisitOrder& step, std::size_t slots, std::size_t ahead, bs::PassCosts costs)
      : step_{step}, slots_{slots}, ahead_{ahead}, costs_{std::move(costs)} {
    for (const bs::PartId part : step) parts_ = std::max(parts_, bs::index_of(part.block) + 1);
  }

  bs::StepCost best() {
    for (std::uint32_t set = 0; set < 1U << parts_; ++set) {
      if (static_cast<std::size_t>(__builtin_popcount(set)) != std::min(slots_, parts_)) continue;
      begin_ = set;
      victims_.assign(step_.size(), none);
      choose(0, set);
    }
    return best_;
  }

 private:
  static constexpr std::size_t none = ~std::size_t{0};

  std::size_t part(std::size_t visit) const {
    return bs::index_of(step_[visit % step_.size()].block);
  }
  bool recent(std::size_t candidate, std::size_t visit) const {
    for (std::size_t back = 1; back <= ahead_; ++back) {
      if (part(visit + ahead_ * step_.size() - back) == candidate) return true;
    }
    return false;
  }
  void choose(std::size_t visit, std::uint32_t set) {
    if (visit == step_.size()) {
      if (set == begin_) play();
      return;
    }
    if ((set >> part(visit) & 1U) != 0) return choose(visit + 1, set);
    for (std::size_t victim = 0; victim < parts_; ++victim) {
      if ((set >> victim & 1U) == 0 || recent(victim, visit)) continue;
      victims_[visit] = victim;
      choose(visit + 1, (set & ~(1U << victim)) | 1U << part(visit));
      victims_[visit] = none;
    }
  }
  void play() {
    constexpr int steps = 12, measured = 4;
    std::vector<double> last_end(parts_, 0);
    double read_end = 0, copy_end = 0, now = 0, before = 0;
    std::uint32_t fetches = 0;
    for (int round = 0; round < steps; ++round) {
      if (round == steps - measured) before = now;
      fetches = 0;
      for (std::size_t v = 0; v < step_.size(); ++v) {
        const bs::BlockCost& cost = costs_.blocks[part(v)];
        double ready = 0;
        if (victims_[v] != none) {
          const double begin = std::max(read_end, last_end[victims_[v]]);
          read_end = begin + cost.read_s;
          copy_end = std::max(std::max(copy_end, begin) + cost.copy_s, read_end);
          ready = copy_end;
          ++fetches;
        }
        now = std::max(now, ready) + cost.compute_s;
        last_end[part(v)] = now;
      }
    }
    const double seconds = (now - before) / measured;
    const bool equal = bs::RetentionModel::equal(seconds, best_.seconds);
    if (found_ && !(equal ? fetches < best_.fetches : seconds < best_.seconds)) return;
    best_ = {seconds, fetches, 0};
    found_ = true;
  }

  bs::VisitOrder step_;
  std::size_t slots_, ahead_, parts_ = 0;
  bs::PassCosts costs_;
  std::uint32_t begin_ = 0;
  std::vector<std::size_t> victims_;
  bs::StepCost best_;
  bool found_ = false;
};

struct Tally {
  int cases = 0, optimal = 0;
  double worst = 0;  ///< of time over the least possible
  void add(double seconds, double least, bool as_few) {
    const double gap = seconds / least - 1;
    ++cases;
    optimal += gap < 1e-9 && as_few ? 1 : 0;
    worst = std::max(worst, gap);
  }
};
std::ostream& operator<<(std::ostream& out, const Tally& t) {
  return out << t.optimal << " of " << t.cases << " steps are the best there are, the worst takes "
             << 100 * t.worst << " % more time";
}

void compare(Tally& tally, const bs::VisitOrder& step, std::uint32_t slots, std::uint32_t ahead,
             const bs::PassCosts& costs) {
  const auto chosen =
      bs::choose_retention(bs::VisitCycle{step}, costs, bs::SlotSpace{slots}, ahead);
  REQUIRE(chosen);
  const bs::StepCost best = EveryStep{step, slots, ahead, costs}.best();
  CAPTURE(step.size(), slots, ahead, costs.blocks[0].read_s, costs.blocks[0].copy_s,
          chosen->cost.seconds, chosen->cost.fetches, best.seconds, best.fetches);
  CHECK(chosen->cost.seconds == Approx(best.seconds));
  CHECK(chosen->cost.fetches == best.fetches);
  tally.add(chosen->cost.seconds, best.seconds, chosen->cost.fetches == best.fetches);
}

/// Reads and copies from free to dominant, against a compute time of 1.
std::vector<bs::BlockCost> all_costs() {
  std::vector<bs::BlockCost> costs;
  for (const double read : {0.25, 1.0, 1.5, 2.0, 5.0, 50.0}) {
    for (const double copy : {0.0, 1.0, 2.0}) costs.push_back({read, copy, 1});
  }
  return costs;
}

/// The fetched visits as a text: F fetched, . found.
std::string picture(const bs::VisitCycle& cycle, const bs::Retention& keep) {
  std::string text;
  for (std::size_t i = 0; i < cycle.size(); ++i) text += keep[cycle.previous(i)] != 0 ? '.' : 'F';
  return text;
}

}  // namespace

TEST_CASE("equal blocks: repeated forwards are optimal against brute force") {
  Tally tally;
  for (const bs::BlockCost& cost : all_costs()) {
    for (std::uint32_t n = 2; n <= 7; ++n) {
      for (std::uint32_t ahead = 0; ahead <= 2 && ahead + 1 < n; ++ahead) {
        for (std::uint32_t slots = ahead + 1; slots <= n; ++slots)
          compare(tally, bs::ascending(0, n), slots, ahead, equal_costs(n, cost));
      }
    }
  }
  WARN("repeated forwards: " << tally);
}

TEST_CASE("equal blocks: training steps are optimal against brute force") {
  Tally tally;
  for (const bs::BlockCost& cost : all_costs()) {
    for (std::uint32_t n = 2; n <= 5; ++n) {
      for (std::uint32_t lowest = 0; lowest < n; ++lowest) {
        for (std::uint32_t ahead = 0; ahead <= 2 && ahead + 1 < n; ++ahead) {
          for (std::uint32_t slots = ahead + 1; slots <= n; ++slots) {
            if (n == 5 && slots == 4 && lowest < 2) continue;  // minutes
            compare(tally, bs::joined(bs::ascending(0, n), bs::descending(lowest, n)), slots, ahead,
                    equal_costs(n, cost));
          }
        }
      }
    }
  }
  WARN("training steps: " << tally);
}

TEST_CASE("blocks that cost differently: close to brute force") {
  Tally tally;
  std::mt19937 random{17};
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t n = 3 + random() % 4, ahead = random() % 2;
    const std::uint32_t slots = ahead + 1 + random() % (n - ahead);
    bs::PassCosts costs;
    for (std::uint32_t b = 0; b < n; ++b)
      costs.blocks.push_back({random() % 3 * 1.0, random() % 3 * 0.5, 0.5 + random() % 3 * 0.5});
    const auto step = bs::ascending(0, n);
    const auto chosen =
        bs::choose_retention(bs::VisitCycle{step}, costs, bs::SlotSpace{slots}, ahead);
    const bs::StepCost best = EveryStep{step, slots, ahead, costs}.best();
    tally.add(chosen->cost.seconds, best.seconds, chosen->cost.fetches <= best.fetches);
  }
  WARN("blocks of different costs: " << tally);
  CHECK(tally.worst < 0.15);
  CHECK(tally.optimal >= 285);
}

TEST_CASE("blocks of different sizes: size classes are close to brute force") {
  Tally tally;
  double most_over = 0, sum_over = 0;
  int steps = 0;
  std::mt19937 random{5};
  for (int round = 0; round < 400; ++round) {
    const std::uint32_t n = 4 + random() % 5, ahead = random() % 2;
    std::vector<std::uint64_t> sizes;
    bs::PassCosts costs;
    std::uint64_t total = 0;
    for (std::uint32_t b = 0; b < n; ++b) {
      sizes.push_back(256 * (8 + random() % 25));
      total += sizes.back();
      costs.blocks.push_back({static_cast<double>(sizes.back()) / 4096, 0, 1});
    }
    const std::uint64_t budget = random() % total;
    const bs::SlotSpace space{bs::choose_slot_sizes(sizes, ahead, budget), sizes};
    const bs::VisitCycle cycle{bs::ascending(0, n)};
    const auto chosen = bs::choose_retention(cycle, costs, space, ahead);
    // Every retention in these slots.
    bs::RetentionModel model{cycle, costs, space, ahead};
    bs::StepCost best = chosen->cost;
    for (std::uint32_t set = 0; set < 1U << n; ++set) {
      bs::Retention keep(n);
      for (std::uint32_t i = 0; i < n; ++i) keep[i] = set >> i & 1U;
      const auto cost = model.evaluate(keep);
      if (cost && cost->seconds < best.seconds) best = *cost;
    }
    tally.add(chosen->cost.seconds, best.seconds, true);
    // Every set of blocks that the budget could hold, whatever the slots: the rest is read.
    std::uint64_t fullest = 0;
    for (std::uint32_t set = 0; set < 1U << n; ++set) {
      std::uint64_t bytes = 0;
      for (std::uint32_t i = 0; i < n; ++i) bytes += (set >> i & 1U) != 0 ? sizes[i] : 0;
      if (bytes <= budget) fullest = std::max(fullest, bytes);
    }
    const double over = chosen->cost.fetch_seconds * 4096 - static_cast<double>(total - fullest);
    most_over = std::max(most_over, over / static_cast<double>(total));
    sum_over += std::max(0.0, over) / static_cast<double>(total);
    ++steps;
  }
  WARN("blocks of 2 to 8 KiB: " << tally << "; bytes read above what the fullest budget leaves: "
                                << 100 * sum_over / steps << " % of the model on average, "
                                << 100 * most_over << " % at most");
  CHECK(tally.worst < 0.15);
  CHECK(sum_over / steps < 0.05);
}

TEST_CASE("the more a block costs, the rather it stays") {
  // Blocks in host memory have no read: device memory goes to the others.
  bs::PassCosts costs;
  for (int b = 0; b < 12; ++b) costs.blocks.push_back({b % 2 == 0 ? 4.0 : 0.0, 0.5, 1});
  const bs::VisitCycle cycle{bs::ascending(0, 12)};
  const auto chosen = bs::choose_retention(cycle, costs, bs::SlotSpace{8}, 1);
  for (std::size_t i = 0; i < 12; i += 2) CHECK(chosen->keep[i] == 1);
  CHECK(chosen->cost.seconds == Approx(12));
}

TEST_CASE("streamed blocks lie between resident ones") {
  // A fetch takes as long as two visits: half of the blocks stay, every second one streams, and
  // each fetch hides behind two visits. Side by side they would take 1.5 times as long.
  const bs::VisitCycle cycle{bs::ascending(0, 16)};
  const auto costs = equal_costs(16, {2, 0, 1});
  const auto chosen = bs::choose_retention(cycle, costs, bs::SlotSpace{10}, 1);
  INFO(picture(cycle, chosen->keep));
  CHECK(chosen->cost.fetches == 8);
  CHECK(chosen->cost.seconds == Approx(16));
  for (std::size_t i = 1; i < 16; ++i) CHECK(chosen->keep[i] != chosen->keep[i - 1]);
}

TEST_CASE("too few slots that take every block") {
  const bs::VisitCycle cycle{bs::ascending(0, 3)};
  CHECK_FALSE(bs::choose_retention(cycle, equal_costs(3, {1, 0, 1}), bs::SlotSpace{1}, 1));
}
