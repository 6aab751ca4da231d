// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <cstdint>
#include <string_view>

namespace block_streamer::inline v1 {

/// @brief Writes spans of a backend's time to a trace sink; asks for the time only while somebody
/// listens.
/// **Threads.** Any, as far as the sink allows. **Lifetime.** The backend outlives it.
template <execution_backend Backend>
class SpanTrace {
 public:
  SpanTrace(const Backend& backend, TraceSinkRef sink) noexcept : backend_{backend}, sink_{sink} {}

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

 private:
  const Backend& backend_;
  TraceSinkRef sink_;
};

}  // namespace block_streamer::inline v1
