// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/trace/lane_overlap.hpp>

#include <support/catch.hpp>

#include <vector>

namespace bs = block_streamer;
using bs::Lane;
using bs::Nanoseconds;

namespace {

bs::TraceEvent span(Lane lane, int begin, int end) {
  return {"x", lane, 0, {}, Nanoseconds{begin}, Nanoseconds{end}, 0};
}

}  // namespace

TEST_CASE("lanes overlap where both are busy, and what goes on twice in one counts once") {
  const std::vector<bs::TraceEvent> events{
      span(Lane::compute, 40, 50), span(Lane::copy_in, 0, 10),  span(Lane::copy_in, 5, 20),
      span(Lane::compute, 15, 30), span(Lane::copy_in, 25, 60), span(Lane::storage, 0, 100),
      span(Lane::compute, 20, 28), span(Lane::copy_in, 70, 70)};
  const bs::LaneOverlap overlap = bs::overlap_of(events, Lane::copy_in, Lane::compute);
  CHECK(overlap.first == Nanoseconds{55});
  CHECK(overlap.second == Nanoseconds{25});
  CHECK(overlap.both == Nanoseconds{5 + 5 + 10});
  CHECK(overlap.hidden() == Approx(20.0 / 25));
  const bs::LaneOverlap turned = bs::overlap_of(events, Lane::compute, Lane::copy_in);
  CHECK(turned.both == overlap.both);
  CHECK(turned.first == overlap.second);
}

TEST_CASE("lanes that take turns hide nothing, and one without anything has nothing to hide") {
  const std::vector<bs::TraceEvent> events{span(Lane::copy_in, 0, 10), span(Lane::compute, 10, 20)};
  CHECK(bs::overlap_of(events, Lane::copy_in, Lane::compute).hidden() == 0);
  CHECK(bs::overlap_of(events, Lane::copy_in, Lane::copy_out).hidden() == 1);
  CHECK(bs::overlap_of({}, Lane::copy_in, Lane::compute).both == Nanoseconds{0});
}
