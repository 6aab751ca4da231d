// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/plan/pass_costs.hpp>
#include <block_streamer/plan/pass_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief How long passes take under a cost model, one after another: what a plan promises before
/// anything is read.
/// A fetch begins once the visits that it waits for are over and the storage is free.
/// **Cost.** O(visits + fetches) a pass.
class PassTimeline {
 public:
  explicit PassTimeline(PassCosts costs) : costs_{std::move(costs)} {}

  /// @brief The pass follows the earlier ones without a pause.
  /// @returns its length, in seconds: from the end of the last visit before to the end of its own.
  /// @throws ContractViolation if a visit comes before the fetch of its part can begin.
  double run(const PassPlan& plan) {
    const double before = end_;
    ready_.resize(std::max(ready_.size(), plan.residency.size()), 0.0);
    std::vector<double> ends{end_};  // [i]: the first i visits are over
    std::size_t fetched = 0;
    const auto fetch_what_may_begin = [&] {
      for (; fetched < plan.fetches.size() && plan.fetches[fetched].after_visits < ends.size();
           ++fetched) {
        const PlannedFetch& f = plan.fetches[fetched];
        ready_[f.slot] = clock_.fetch(ends[f.after_visits], costs_.of(f.part));
      }
    };
    for (const PlannedVisit& visit : plan.visits) {
      fetch_what_may_begin();
      end_ = std::max(end_, ready_[visit.slot]) + costs_.of(visit.part).compute_s;
      ends.push_back(end_);
    }
    fetch_what_may_begin();
    expects(fetched == plan.fetches.size(), "a fetch waits for a visit that its pass has not");
    return end_ - before;
  }

 private:
  PassCosts costs_;
  FetchClock clock_;
  double end_ = 0;             ///< of the last visit
  std::vector<double> ready_;  ///< per slot: when its part is there
};

}  // namespace block_streamer::inline v1
