// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/trace/trace_sink.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Time of a timeline in which something of a lane went on; however much at once, it counts once.
struct LaneOverlap {
  Nanoseconds first{};   ///< in which one lane was busy
  Nanoseconds second{};  ///< in which the other was
  Nanoseconds both{};    ///< in which both were

  /// @brief The part of the less busy lane's time that the other hid: 1 is all of it, 0 none. 1 if
  /// it was never busy.
  [[nodiscard]] double hidden() const noexcept {
    const Nanoseconds less = std::min(first, second);
    return less == Nanoseconds::zero()
               ? 1
               : static_cast<double>(both.count()) / static_cast<double>(less.count());
  }
};

namespace detail {

using TimeRange = std::pair<Nanoseconds, Nanoseconds>;

/// Disjoint, ascending.
[[nodiscard]] inline std::vector<TimeRange> busy_ranges(std::span<const TraceEvent> events,
                                                        Lane lane) {
  std::vector<TimeRange> ranges;
  for (const TraceEvent& event : events) {
    if (event.lane == lane && event.end > event.begin) ranges.emplace_back(event.begin, event.end);
  }
  std::sort(ranges.begin(), ranges.end());
  std::vector<TimeRange> joined;
  for (const TimeRange& range : ranges) {
    if (!joined.empty() && range.first <= joined.back().second) {
      joined.back().second = std::max(joined.back().second, range.second);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

[[nodiscard]] inline Nanoseconds total_of(std::span<const TimeRange> ranges) {
  Nanoseconds total{};
  for (const auto& [begin, end] : ranges) total += end - begin;
  return total;
}

}  // namespace detail

/// @brief How far two lanes of a device went on at once. **Cost.** O(n log n), memory for them.
[[nodiscard]] inline LaneOverlap overlap_of(std::span<const TraceEvent> events, Lane first,
                                            Lane second) {
  const auto some = detail::busy_ranges(events, first),
             others = detail::busy_ranges(events, second);
  LaneOverlap overlap{detail::total_of(some), detail::total_of(others), {}};
  for (std::size_t i = 0, j = 0; i < some.size() && j < others.size();) {
    const Nanoseconds begin = std::max(some[i].first, others[j].first);
    const Nanoseconds end = std::min(some[i].second, others[j].second);
    if (end > begin) overlap.both += end - begin;
    some[i].second < others[j].second ? ++i : ++j;
  }
  return overlap;
}

}  // namespace block_streamer::inline v1
