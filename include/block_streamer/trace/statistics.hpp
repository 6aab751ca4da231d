// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace block_streamer::inline v1 {

/// @brief What streaming has cost since the last reset. Plain values: the owner guards them.
/// A *fetch* brings one part into a slot; a *visit* uses one part once; a *pass* is one walk over
/// the block list. Every byte is counted once, where the operation that moves it is issued.
struct Statistics {
  std::uint64_t passes = 0;   ///< walks begun, forward or backward
  std::uint64_t visits = 0;   ///< leases taken
  std::uint64_t fetches = 0;  ///< parts brought into a slot; visits - fetches were already resident
  std::uint64_t bytes_needed = 0;  ///< slot bytes of the fetched parts: what computing asked for
  std::uint64_t bytes_read = 0;    ///< image bytes asked of the tier, over-read included
  std::uint64_t bytes_copied = 0;  ///< host to device, into slots
  std::uint64_t bytes_copied_out = 0;  ///< device to host: gradients and written-back weights
  std::uint64_t bytes_converted =
      0;  ///< bound bytes written by finishers (dtype change, unpacking)
  std::uint64_t resident_blocks = 0;  ///< slots not empty now, copies in flight included
  std::uint64_t resident_bytes = 0;   ///< device bytes of those slots now
  std::uint64_t peak_resident_blocks = 0;
  std::uint64_t peak_resident_bytes = 0;
  /// Device bytes of the place that finishers write to, while it is held; 0 without a finisher. On
  /// top of the resident bytes.
  std::uint64_t bound_bytes = 0;
  double storage_wait_s = 0;  ///< visitor blocked because a read or a staging chunk was not there
  double device_wait_s = 0;   ///< visitor blocked because the device had not finished a copy

  /// @brief A slot was filled with `byte_count` bytes: raises the gauges and their peaks.
  void add_resident(std::uint64_t byte_count) noexcept {
    resident_blocks += 1;
    resident_bytes += byte_count;
    peak_resident_blocks = std::max(peak_resident_blocks, resident_blocks);
    peak_resident_bytes = std::max(peak_resident_bytes, resident_bytes);
  }
  /// @brief A slot became empty. @pre its add_resident came before, with the same size.
  void remove_resident(std::uint64_t byte_count) noexcept {
    resident_blocks -= 1;
    resident_bytes -= byte_count;
  }
  /// @brief Counts from zero again. What is resident stays so, and is where the peaks restart.
  void reset() noexcept {
    Statistics fresh;
    fresh.resident_blocks = fresh.peak_resident_blocks = resident_blocks;
    fresh.resident_bytes = fresh.peak_resident_bytes = resident_bytes;
    fresh.bound_bytes = bound_bytes;
    *this = fresh;
  }
  friend bool operator==(const Statistics&, const Statistics&) = default;
};

/// @brief Calls `visitor(std::string_view name, value)` for every member in order of declaration;
/// `value` is std::uint64_t, or double in seconds where the name ends in "_s". The one list that
/// writers of reports go by.
template <class Visitor>
constexpr void for_each_statistic(const Statistics& s, Visitor&& visitor) {
  visitor(std::string_view{"passes"}, s.passes);
  visitor(std::string_view{"visits"}, s.visits);
  visitor(std::string_view{"fetches"}, s.fetches);
  visitor(std::string_view{"bytes_needed"}, s.bytes_needed);
  visitor(std::string_view{"bytes_read"}, s.bytes_read);
  visitor(std::string_view{"bytes_copied"}, s.bytes_copied);
  visitor(std::string_view{"bytes_copied_out"}, s.bytes_copied_out);
  visitor(std::string_view{"bytes_converted"}, s.bytes_converted);
  visitor(std::string_view{"resident_blocks"}, s.resident_blocks);
  visitor(std::string_view{"resident_bytes"}, s.resident_bytes);
  visitor(std::string_view{"peak_resident_blocks"}, s.peak_resident_blocks);
  visitor(std::string_view{"peak_resident_bytes"}, s.peak_resident_bytes);
  visitor(std::string_view{"bound_bytes"}, s.bound_bytes);
  visitor(std::string_view{"storage_wait_s"}, s.storage_wait_s);
  visitor(std::string_view{"device_wait_s"}, s.device_wait_s);
}
// A member that the list forgets is a compile error here: all members are eight bytes.
static_assert(sizeof(Statistics) == [] {
  std::size_t count = 0;
  for_each_statistic(Statistics{}, [&](std::string_view, auto) { ++count; });
  return count;
}() * sizeof(std::uint64_t));

}  // namespace block_streamer::inline v1
