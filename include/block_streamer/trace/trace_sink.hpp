// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <string_view>

namespace block_streamer::inline v1 {

/// Time since the backend's epoch: real, or virtual under simulation.
using Nanoseconds = std::chrono::nanoseconds;

/// The row of a timeline that an event belongs to.
enum class Lane : std::uint8_t { caller, storage, copy_in, compute, copy_out, optimizer };

/// One finished interval (begin < end) or an instant (begin == end). Device intervals arrive late
/// and out of order; both ends are known. `name` has static storage duration: nothing is allocated
/// on the path.
struct TraceEvent {
  std::string_view name;
  Lane lane = Lane::caller;
  std::uint16_t device = 0;
  PartId part{};
  Nanoseconds begin{};
  Nanoseconds end{};
  std::uint64_t byte_count = 0;
};

/// @brief Receives finished events.
/// - `enabled()`: one relaxed load; callers take no time stamps while it is false.
/// - `record(event)`: from any thread at once, never throws, never blocks on I/O (a full buffer
/// drops and
///   counts).
/// **Lifetime.** A sink outlives every object that was given a TraceSinkRef to it.
template <class T>
concept trace_sink = requires(T& sink, const T& constant_sink, const TraceEvent& event) {
  { constant_sink.enabled() }
  noexcept->std::same_as<bool>;
  { sink.record(event) }
  noexcept->std::same_as<void>;
};

/// Non-owning, erased, so that a sink's type never multiplies instantiations. Default: disabled.
class TraceSinkRef {
 public:
  TraceSinkRef() noexcept = default;
  template <class T>
  requires(!std::same_as<T, TraceSinkRef> && trace_sink<T>) TraceSinkRef(T& sink)
  noexcept  // NOLINT(google-explicit-constructor): a reference to a sink converts
      : sink_{&sink},
        enabled_{[](const void* s) noexcept { return static_cast<const T*>(s)->enabled(); }},
        record_{[](void* s, const TraceEvent& e) noexcept { static_cast<T*>(s)->record(e); }} {}

  [[nodiscard]] bool enabled() const noexcept { return sink_ != nullptr && enabled_(sink_); }
  /// @pre enabled() was true.
  void record(const TraceEvent& event) noexcept { record_(sink_, event); }

 private:
  void* sink_ = nullptr;
  bool (*enabled_)(const void*) noexcept = nullptr;
  void (*record_)(void*, const TraceEvent&) noexcept = nullptr;
};
static_assert(trace_sink<TraceSinkRef>);

}  // namespace block_streamer::inline v1
