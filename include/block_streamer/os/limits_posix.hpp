// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/os/cgroup_memory.hpp>

#include <sys/resource.h>

#include <cstdint>
#include <optional>

namespace block_streamer::inline v1 {

/// @brief Bytes of memory that this process can still take without swapping or being killed.
/// nullopt if nothing is known.
[[nodiscard]] inline std::optional<std::uint64_t> available_memory() {
  return available_memory("/");
}

/// @brief How many bytes this process may lock in memory; nullopt: unlimited.
[[nodiscard]] inline std::optional<std::uint64_t> memlock_limit() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return static_cast<std::uint64_t>(limit.rlim_cur);
}

}  // namespace block_streamer::inline v1
