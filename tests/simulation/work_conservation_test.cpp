// SPDX-License-Identifier: Apache-2.0
// From what a run recorded: does every stage begin each of its operations in the very moment in
// which it is free, its input is there and there is room?
#include <support/catch.hpp>

#include "scenes.hpp"

namespace bs = block_streamer;
using namespace support;

namespace {

/// What was recorded, and the plan that says which operation needed which.
class Recording {
 public:
  Recording(const SimulatedScene& scene, const SimulatedOutcome& run)
      : scene_{scene},
        run_{run},
        reads_{run.trace.lane(bs::Lane::storage)},
        copies_{run.trace.lane(bs::Lane::copy_in)},
        computes_{run.trace.lane(bs::Lane::compute)},
        tenant_(run.slot_count) {}

  /// Operations that did not begin at once, or began too early; -1 if the numbers do not fit.
  int idle_moments() {
    for (const bs::PassWork& pass : run_.work) {
      first_visit_ = visits_.size();
      begun_ = visits_.empty() ? Nanoseconds{} : visits_.back();
      computed_before_ = visits_.empty() ? Nanoseconds{} : computes_.at(first_visit_ - 1).end;
      std::size_t fetch = 0;
      for (std::size_t v = 0; v <= pass.plan.visits.size(); ++v) {
        // what may be begun before visit v is over
        while (fetch < pass.plan.fetches.size() && pass.plan.fetches[fetch].after_visits <= v) {
          begin(pass.plan.fetches[fetch++]);
        }
        if (v < pass.plan.visits.size()) visit(pass.plan.visits[v].slot);
      }
    }
    const bool all_seen =
        chunk_ == reads_.size() && chunk_ == copies_.size() && visits_.size() == computes_.size();
    return all_seen ? idle_ : -1;
  }

 private:
  struct Tenant {
    Nanoseconds arrived{}, copied{}, computed{};
  };
  void begin(const bs::PlannedFetch& fetch) {
    Tenant& slot = tenant_[fetch.slot];
    // The tenant before was released when the visitor had its last byte, and everybody's before.
    const Nanoseconds released =
        fetch.after_visits == 0 ? begun_ : visits_[first_visit_ + fetch.after_visits - 1];
    slot.arrived = slot.copied = released;
    const auto n = bs::plan_staged_reads(scene_.images[bs::index_of(fetch.part.block)], 0,
                                         scene_.chunk_byte_count)
                       .chunks.size();
    for (std::size_t c = 0; c < n; ++c, ++chunk_) {
      Nanoseconds work_and_room = released;
      if (chunk_ >= run_.ticket_count) {
        work_and_room = std::max(work_and_room, copies_.at(chunk_ - run_.ticket_count).end);
      }
      if (chunk_ > 0) work_and_room = std::max(work_and_room, reads_.at(chunk_ - 1).end);
      idle_ += reads_.at(chunk_).begin != work_and_room;

      work_and_room = std::max({reads_.at(chunk_).end, slot.computed, computed_before_});
      if (chunk_ > 0) work_and_room = std::max(work_and_room, copies_.at(chunk_ - 1).end);
      idle_ += copies_.at(chunk_).begin != work_and_room;
      slot.arrived = reads_.at(chunk_).end;
      slot.copied = copies_.at(chunk_).end;
    }
  }
  void visit(std::uint32_t slot) {
    const std::size_t v = visits_.size();
    const Nanoseconds free = v == 0 ? Nanoseconds{} : computes_.at(v - 1).end;
    const Nanoseconds previous = v == 0 ? Nanoseconds{} : visits_.back();
    visits_.push_back(std::max(previous, tenant_[slot].arrived));
    idle_ += computes_.at(v).begin != std::max({free, tenant_[slot].copied, visits_.back()});
    tenant_[slot].computed = computes_.at(v).end;
  }

  const SimulatedScene& scene_;
  const SimulatedOutcome& run_;
  std::vector<bs::TraceEvent> reads_, copies_, computes_;
  std::vector<Tenant> tenant_;
  std::vector<Nanoseconds> visits_;  ///< when each was acquired
  std::size_t first_visit_ = 0;
  std::size_t chunk_ = 0;
  Nanoseconds begun_{};            ///< the pass, by the visitor
  Nanoseconds computed_before_{};  ///< all passes before it
  int idle_ = 0;
};

}  // namespace

TEST_CASE("no stage idles while it has work and room") {
  std::size_t operations = 0;
  for (const Regime& regime : regimes) {
    for_each_budget([&](std::uint32_t cached, std::uint32_t ahead, std::uint32_t tickets) {
      SimulatedScene scene = training_scene(regime, 7 + ahead);
      scene.cached = cached;
      scene.ahead = ahead;
      scene.ticket_count = tickets;
      const SimulatedOutcome run = simulate(scene);
      INFO(regime.name << "-bound, prefetch_ahead " << ahead << ", " << cached << " cached, "
                       << tickets << " chunks");
      CHECK(Recording{scene, run}.idle_moments() == 0);
      for (const auto lane : {bs::Lane::storage, bs::Lane::copy_in, bs::Lane::compute})
        operations += run.trace.lane(lane).size();
    });
  }
  CHECK(operations > 20'000);
}
