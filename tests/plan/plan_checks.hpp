// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/plan/pass_plan.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace support {
namespace bs = block_streamer;

/// Plays a plan: every visit finds its part, and no fetch replaces a part before the visits it
/// waits for.
inline void check_plan(const bs::PassPlan& plan, const bs::SlotContents& before,
                       std::uint32_t ahead) {
  bs::SlotContents slots = before;
  std::size_t next_fetch = 0;
  for (std::size_t visit = 0; visit < plan.visits.size(); ++visit) {
    // Issue, in order, every fetch whose slot is free after the visits released so far.
    while (next_fetch < plan.fetches.size() && plan.fetches[next_fetch].after_visits <= visit) {
      slots[plan.fetches[next_fetch].slot] = plan.fetches[next_fetch].part;
      ++next_fetch;
    }
    INFO("visit " << visit);
    REQUIRE(slots[plan.visits[visit].slot] == plan.visits[visit].part);
  }
  for (; next_fetch < plan.fetches.size(); ++next_fetch) {
    CHECK(plan.fetches[next_fetch].after_visits <= plan.visits.size());
    slots[plan.fetches[next_fetch].slot] = plan.fetches[next_fetch].part;
  }
  CHECK(slots == plan.residency);
  // Prefetch has room: a fetch may be issued while the `ahead` visits before its own are still to
  // come.
  for (const bs::PlannedFetch& fetch : plan.fetches) {
    for (std::size_t visit = fetch.after_visits; visit < plan.visits.size(); ++visit) {
      if (plan.visits[visit].part != fetch.part) continue;
      CHECK(fetch.after_visits + ahead <= std::max<std::size_t>(visit, ahead));
      break;
    }
  }
}

/// Equal costs for every block.
inline bs::PassCosts equal_costs(std::size_t blocks, const bs::BlockCost& cost) {
  return {std::vector<bs::BlockCost>(blocks, cost)};
}

}  // namespace support
