// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/plan/visit_cycle.hpp>
#include <block_streamer/plan/visit_order.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("forward and backward of a step find the same cycle") {
  const auto forward = bs::ascending(0, 5), backward = bs::descending(2, 5);
  const auto from_forward = bs::VisitCycle::of(forward, bs::joined(backward, forward));
  const auto from_backward = bs::VisitCycle::of(backward, bs::joined(forward, backward));
  REQUIRE(from_forward);
  REQUIRE(from_backward);
  REQUIRE(from_forward->size() == 8);
  CHECK(std::equal(from_forward->visits().begin(), from_forward->visits().end(),
                   from_backward->visits().begin(), from_backward->visits().end()));
  for (std::size_t i = 0; i < forward.size(); ++i)
    CHECK(from_forward->part(from_forward->position(i)) == forward[i]);
  for (std::size_t i = 0; i < backward.size(); ++i)
    CHECK(from_backward->part(from_backward->position(i)) == backward[i]);
}

TEST_CASE("nothing repeats unless the pass is seen to come again") {
  const auto forward = bs::ascending(0, 3);
  CHECK_FALSE(bs::VisitCycle::of(forward, {}));
  CHECK_FALSE(bs::VisitCycle::of(forward, bs::descending(0, 3)));  // 0 1 2 2 1 | 0 is no evidence
  CHECK_FALSE(bs::VisitCycle::of({}, forward));
  CHECK(bs::VisitCycle::of(forward, forward)->size() == 3);
}

TEST_CASE("from a visit to the next of the same part, around the end") {
  const bs::VisitCycle cycle{bs::joined(bs::ascending(0, 3), bs::descending(1, 3))};  // 0 1 2 2 1
  CHECK(cycle.distance(0) == 5);
  CHECK(cycle.distance(1) == 3);
  CHECK(cycle.distance(2) == 1);
  CHECK(cycle.distance(3) == 4);
  CHECK(cycle.previous(0) == 0);
  CHECK(cycle.previous(2) == 3);
  CHECK(cycle.last_before(0, {bs::block_at(1)}) == 4U);
  CHECK_FALSE(cycle.last_before(0, {bs::block_at(9)}));
}
