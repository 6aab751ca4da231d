// SPDX-License-Identifier: Apache-2.0
#pragma once

// The platform twins declare the same members; this is the one place that chooses.
#if defined(_WIN32)
#include <block_streamer/os/limits_windows.hpp>
#elif defined(__unix__) || defined(__APPLE__)
#include <block_streamer/os/limits_posix.hpp>
#else
#error "block_streamer/os/limits.hpp: only POSIX systems and Windows are supported"
#endif

#include <algorithm>
#include <cstdint>

namespace block_streamer::inline v1 {

/// @brief How much of `available` memory weights may fill: less 2 GiB or 15 %, whichever is more.
[[nodiscard]] constexpr std::uint64_t fillable_memory(std::uint64_t available) noexcept {
  const std::uint64_t margin = std::max(std::uint64_t{2} << 30, available / 100 * 15);
  return available - std::min(available, margin);
}

}  // namespace block_streamer::inline v1
