// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/os/windows_api.hpp>

#include <psapi.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace block_streamer::inline v1 {

namespace detail {

/// What is left of a job object's limit on this process's memory; nullopt without one.
[[nodiscard]] inline std::optional<std::uint64_t> job_headroom() noexcept {
  JOBOBJECT_EXTENDED_LIMIT_INFORMATION job{};
  PROCESS_MEMORY_COUNTERS_EX used{};
  used.cb = sizeof(used);
  // No job asked for: the one that this process runs in.
  if (::QueryInformationJobObject(nullptr, JobObjectExtendedLimitInformation, &job, sizeof(job),
                                  nullptr) == 0 ||
      ::K32GetProcessMemoryInfo(::GetCurrentProcess(),
                                reinterpret_cast<PROCESS_MEMORY_COUNTERS*>(&used),
                                sizeof(used)) == 0) {
    return std::nullopt;
  }
  std::optional<std::uint64_t> limit;
  const DWORD flags = job.BasicLimitInformation.LimitFlags;
  if ((flags & JOB_OBJECT_LIMIT_PROCESS_MEMORY) != 0) limit = job.ProcessMemoryLimit;
  if ((flags & JOB_OBJECT_LIMIT_JOB_MEMORY) != 0) {
    limit = std::min<std::uint64_t>(job.JobMemoryLimit, limit.value_or(job.JobMemoryLimit));
  }
  if (!limit) return std::nullopt;
  return *limit - std::min<std::uint64_t>(used.PrivateUsage, *limit);
}

}  // namespace detail

/// @brief Bytes of memory that this process can still take without paging or being refused: free
/// memory, within what the system may commit and within a job object's limit. nullopt if nothing is
/// known.
[[nodiscard]] inline std::optional<std::uint64_t> available_memory() noexcept {
  MEMORYSTATUSEX status{};
  status.dwLength = sizeof(status);
  std::optional<std::uint64_t> available;
  if (::GlobalMemoryStatusEx(&status) != 0) {
    available = std::min<std::uint64_t>(status.ullAvailPhys, status.ullAvailPageFile);
  }
  if (const auto room = detail::job_headroom()) {
    available = std::min(*room, available.value_or(*room));
  }
  return available;
}

/// @brief How many bytes this process may lock in memory; nullopt: unlimited. Windows has no such
/// limit beside the working set's, which VirtualLock alone minds and a device driver does not.
[[nodiscard]] inline std::optional<std::uint64_t> memlock_limit() noexcept {
  return std::nullopt;
}

}  // namespace block_streamer::inline v1
