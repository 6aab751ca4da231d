// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/trace/trace_sink.hpp>

#include <algorithm>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A trace_sink that keeps every event, for whoever asks questions about a simulated run.
/// **Threads.** One.
class RecordedTrace {
 public:
  [[nodiscard]] static bool enabled() noexcept { return true; }
  void record(const TraceEvent& event) noexcept { events_.push_back(event); }

  /// @brief The events of one lane, by begin.
  [[nodiscard]] std::vector<TraceEvent> lane(Lane lane) const {
    std::vector<TraceEvent> chosen;
    std::ranges::copy_if(events_, std::back_inserter(chosen),
                         [lane](const TraceEvent& e) { return e.lane == lane; });
    std::ranges::stable_sort(chosen, {}, &TraceEvent::begin);
    return chosen;
  }
  void clear() noexcept { events_.clear(); }

 private:
  std::vector<TraceEvent> events_;
};
static_assert(trace_sink<RecordedTrace>);

}  // namespace block_streamer::inline v1
