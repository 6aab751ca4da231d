// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <deque>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A backend whose device runs behind the host and keeps time of its own.
template <class B>
concept device_timing_backend = execution_backend<B> &&
    requires(B& backend, typename B::Event& begin, typename B::Event& end) {
  { backend.make_timing_event() } -> std::same_as<typename B::Event>;
  { backend.elapsed(begin, end) } -> std::same_as<Nanoseconds>;
};

/// @brief Intervals of the device's own time, by timing events around what is enqueued, on the
/// host's clock: an anchor, an event whose moment on that clock is known, ties the two. Each second
/// a later event becomes the anchor, since the time between two is a float.
/// Intervals arrive at the sink late: with a later begin(), once the device is past them, or with
/// drain().
/// **Threads.** Externally synchronised. **Errors.** DeviceError. **Lifetime.** The backend and
/// what it enqueues to outlive it. **Cost.** Two records an interval, and for the oldest a query;
/// the first one waits for its stream. Memory for the intervals that the device is behind.
template <device_timing_backend Backend>
class DeviceSpans {
 public:
  using Stream = typename Backend::Stream;
  using Event = typename Backend::Event;

  DeviceSpans(Backend& backend, TraceSinkRef sink) noexcept : backend_{backend}, sink_{sink} {}

  /// @brief An interval begins on the stream: to be given to end().
  [[nodiscard]] Event begin(Stream& stream) {
    if (!anchor_) drop_anchor(stream);
    collect();
    return recorded(stream);
  }
  /// @param span  what it is; its times are filled in later.
  void end(Event begin, const TraceEvent& span, Stream& stream) {
    pending_.push_back({std::move(begin), recorded(stream), span});
  }
  /// @brief Waits for what is pending and tells it.
  void drain() {
    while (!pending_.empty()) {
      backend_.synchronize(pending_.front().end);
      tell_oldest();
    }
  }

 private:
  static constexpr int anchor_tries = 8;

  struct Pending {
    Event begin;
    Event end;
    TraceEvent span;
  };
  struct Anchor {
    Event event;
    Nanoseconds time;  ///< on the host's clock
  };

  /// The moment lies between the record and the host's seeing it: the shortest of several such
  /// times counts, since the first waits for what the stream has before it, and any may meet a
  /// driver that is busy. Asks until the device is there: who sleeps until then sees it late.
  void drop_anchor(Stream& stream) {
    Nanoseconds shortest = Nanoseconds::max();
    for (int i = 0; i < anchor_tries; ++i) {
      const Nanoseconds before = backend_.now();
      Event event = recorded(stream);
      while (!backend_.query(event)) {
      }
      const Nanoseconds seen = backend_.now();
      if (seen - before < shortest) {
        shortest = seen - before;
        if (anchor_) free_.push_back(std::move(anchor_->event));
        anchor_.emplace(Anchor{std::move(event), seen});
      } else {
        free_.push_back(std::move(event));
      }
    }
  }
  [[nodiscard]] Event recorded(Stream& stream) {
    if (free_.empty()) free_.push_back(backend_.make_timing_event());
    Event event = std::move(free_.back());
    free_.pop_back();
    backend_.record(event, stream);
    return event;
  }
  void collect() {
    while (!pending_.empty() && backend_.query(pending_.front().end)) tell_oldest();
  }
  void tell_oldest() {
    Pending oldest = std::move(pending_.front());
    pending_.pop_front();
    const Nanoseconds since = backend_.elapsed(anchor_->event, oldest.begin);
    oldest.span.begin = anchor_->time + since;
    oldest.span.end = oldest.span.begin + backend_.elapsed(oldest.begin, oldest.end);
    sink_.record(oldest.span);
    if (since > std::chrono::seconds{1}) {
      std::swap(anchor_->event, oldest.begin);
      anchor_->time = oldest.span.begin;
    }
    free_.push_back(std::move(oldest.begin));
    free_.push_back(std::move(oldest.end));
  }

  Backend& backend_;
  TraceSinkRef sink_;
  std::optional<Anchor> anchor_;
  std::deque<Pending> pending_;  ///< oldest first
  std::vector<Event> free_;
};

}  // namespace block_streamer::inline v1
