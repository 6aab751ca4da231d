// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>

namespace block_streamer::inline v1 {

/// Half-open range of bytes [offset, offset + byte_count).
struct ByteRange {
  std::uint64_t offset = 0;
  std::uint64_t byte_count = 0;
  /// @pre offset + byte_count does not overflow.
  [[nodiscard]] constexpr std::uint64_t end() const noexcept { return offset + byte_count; }
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

/// @brief a + b, or nullopt where 64 bits do not hold it.
[[nodiscard]] constexpr std::optional<std::uint64_t> checked_add(std::uint64_t a,
                                                                 std::uint64_t b) noexcept {
  if (a > std::numeric_limits<std::uint64_t>::max() - b) return std::nullopt;
  return a + b;
}

/// @brief a * b, or nullopt where 64 bits do not hold it.
[[nodiscard]] constexpr std::optional<std::uint64_t> checked_multiply(std::uint64_t a,
                                                                      std::uint64_t b) noexcept {
  if (b != 0 && a > std::numeric_limits<std::uint64_t>::max() / b) return std::nullopt;
  return a * b;
}

/// @brief The largest multiple of `granularity` (any positive number) not above `value`.
[[nodiscard]] constexpr std::uint64_t round_down(std::uint64_t value,
                                                 std::uint64_t granularity) noexcept {
  return value - value % granularity;
}

/// @brief The smallest multiple of `granularity` not below `value`. @pre it fits 64 bits.
[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t value,
                                               std::uint64_t granularity) noexcept {
  return round_down(value + granularity - 1, granularity);
}

}  // namespace block_streamer::inline v1
