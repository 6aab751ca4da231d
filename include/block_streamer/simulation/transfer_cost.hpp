// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/trace/trace_sink.hpp>

#include <cstdint>

namespace block_streamer::inline v1 {

/// What it costs to move bytes over a link that carries one transfer at a time.
struct TransferCost {
  std::uint64_t bytes_per_s = 0;  ///< 0: no limit
  Nanoseconds latency{};          ///< of each transfer

  /// @brief The time that the bytes themselves take, without latency, rounded up.
  [[nodiscard]] constexpr Nanoseconds byte_time(std::uint64_t byte_count) const noexcept {
    if (bytes_per_s == 0) return {};
    __extension__ using Wide = unsigned __int128;
    const Wide time = (Wide{byte_count} * 1'000'000'000U + bytes_per_s - 1) / bytes_per_s;
    return Nanoseconds{static_cast<std::int64_t>(time)};
  }
  /// @brief Latency and bytes.
  [[nodiscard]] constexpr Nanoseconds time(std::uint64_t byte_count) const noexcept {
    return latency + byte_time(byte_count);
  }
};

}  // namespace block_streamer::inline v1
