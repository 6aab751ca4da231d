// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(_WIN32)
#include <block_streamer/os/windows_api.hpp>

#include <psapi.h>
#else
#include <sys/resource.h>
#endif

namespace support {

/// The most memory that this process has had resident so far, in KiB.
[[nodiscard]] inline std::int64_t peak_kibibytes() {
#if defined(_WIN32)
  PROCESS_MEMORY_COUNTERS used{};
  used.cb = sizeof(used);
  return ::K32GetProcessMemoryInfo(::GetCurrentProcess(), &used, sizeof(used)) != 0
             ? static_cast<std::int64_t>(used.PeakWorkingSetSize / 1024)
             : 0;
#else
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
#endif
}

}  // namespace support
