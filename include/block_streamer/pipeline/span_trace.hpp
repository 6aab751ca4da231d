// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/pipeline/device_spans.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

namespace block_streamer::inline v1 {

/// @brief Writes spans of a backend's time to a trace sink; asks for the time only while somebody
/// listens.
/// What is enqueued on a stream is a span of the device's time where the backend tells it, else of
/// the host's while it enqueues (which is the work itself where it is done there and then).
/// **Threads.** begin() and end(): any, as far as the sink allows. begin_on(), end_on(), drain(),
/// pause(): one at a time. **Lifetime.** The backend outlives it.
template <execution_backend Backend>
class SpanTrace {
 public:
  using Stream = typename Backend::Stream;
  static constexpr bool tells_device_time = device_timing_backend<Backend>;

  /// When something enqueued began.
  struct Begin {
    Nanoseconds host{};
    std::optional<typename Backend::Event> device{};  ///< where the backend tells device time
  };

  SpanTrace(Backend& backend, TraceSinkRef sink) noexcept
      : backend_{backend}, sink_{sink}, device_{make_device_spans(backend, sink)} {}

  [[nodiscard]] bool enabled() const noexcept { return sink_.enabled(); }
  /// @returns when a span begins; zero if nobody listens.
  [[nodiscard]] Nanoseconds begin() const noexcept {
    return enabled() ? backend_.now() : Nanoseconds::zero();
  }
  /// @brief The span is over.
  /// @param byte_count  what it moved or computed with.
  void end(std::string_view name, Lane lane, PartId part, Nanoseconds begin,
           std::uint64_t byte_count) noexcept {
    if (enabled()) sink_.record({name, lane, 0, part, begin, backend_.now(), byte_count});
  }

  /// @brief Work is about to be enqueued. @throws DeviceError
  [[nodiscard]] Begin begin_on(Stream& stream) {
    Begin begin{this->begin(), {}};
    if constexpr (tells_device_time) {
      if (enabled() && !paused_) begin.device.emplace(device_.begin(stream));
    }
    return begin;
  }
  /// @brief It is enqueued. A span in the lane; where that is device time, what the host did
  /// meanwhile is the caller's span "enqueue". @throws DeviceError
  void end_on(std::string_view name, Lane lane, PartId part, Begin begin, std::uint64_t byte_count,
              Stream& stream) {
    if (!enabled()) return;
    if constexpr (tells_device_time) {
      end("enqueue", Lane::caller, part, begin.host, byte_count);
      if (begin.device)
        device_.end(std::move(*begin.device), {name, lane, 0, part, {}, {}, byte_count}, stream);
    } else {
      end(name, lane, part, begin.host, byte_count);
    }
  }
  /// @brief Waits until the device is past every span, and tells them. @throws DeviceError
  void drain() {
    if constexpr (tells_device_time) device_.drain();
  }
  /// @brief Whether the device's time is left out: what is enqueued is recorded, not done.
  void pause(bool on) noexcept { paused_ = on; }

 private:
  static auto make_device_spans(Backend& backend, TraceSinkRef sink) noexcept {
    if constexpr (tells_device_time) {
      return DeviceSpans<Backend>{backend, sink};
    } else {
      return std::monostate{};
    }
  }
  using Spans = decltype(make_device_spans(std::declval<Backend&>(), std::declval<TraceSinkRef>()));

  Backend& backend_;
  TraceSinkRef sink_;
  bool paused_ = false;
  Spans device_;
};

}  // namespace block_streamer::inline v1
