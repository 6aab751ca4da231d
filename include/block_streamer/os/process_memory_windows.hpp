// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/os/windows_api.hpp>

#include <psapi.h>

#include <cstdint>
#include <optional>

namespace block_streamer::inline v1 {

namespace detail {
[[nodiscard]] inline std::optional<PROCESS_MEMORY_COUNTERS> memory_counters() noexcept {
  PROCESS_MEMORY_COUNTERS counters{};
  counters.cb = sizeof(counters);
  if (::K32GetProcessMemoryInfo(::GetCurrentProcess(), &counters, sizeof(counters)) == 0)
    return std::nullopt;
  return counters;
}
}  // namespace detail

/// @brief Memory of this process that is resident now, its working set, in bytes.
[[nodiscard]] inline std::optional<std::uint64_t> resident_memory() noexcept {
  const auto counters = detail::memory_counters();
  if (!counters) return std::nullopt;
  return std::uint64_t{counters->WorkingSetSize};
}

/// @brief The most that resident_memory() has been since the program began.
[[nodiscard]] inline std::optional<std::uint64_t> peak_resident_memory() noexcept {
  const auto counters = detail::memory_counters();
  if (!counters) return std::nullopt;
  return std::uint64_t{counters->PeakWorkingSetSize};
}

}  // namespace block_streamer::inline v1
