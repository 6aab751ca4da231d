// SPDX-License-Identifier: Apache-2.0
// What this process has cost so far, as the system counts it.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

namespace block_streamer_benchmarks {

/// @brief Processor time of all threads, in seconds.
[[nodiscard]] inline double cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// @brief Bytes that drives delivered for this process; 0 where that is not told.
[[nodiscard]] inline std::uint64_t drive_bytes() {
  std::ifstream in{"/proc/self/io"};
  std::string key;
  std::uint64_t value = 0;
  while (in >> key >> value) {
    if (key == "read_bytes:") return value;
  }
  return 0;
}

/// @brief Memory of this process that is resident, in bytes.
[[nodiscard]] inline std::uint64_t resident_bytes() {
  std::ifstream in{"/proc/self/statm"};
  std::uint64_t pages = 0, resident = 0;
  in >> pages >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// @brief Takes files out of the page cache, or into it.
inline void set_cached(std::span<const std::filesystem::path> files, bool cached) {
  for (const std::filesystem::path& path : files) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    if (cached) {
      std::string buffer(std::size_t{1} << 22, '\0');
      while (::read(file, buffer.data(), buffer.size()) > 0) {
      }
    } else {
      static_cast<void>(::fdatasync(file));
      static_cast<void>(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED));
    }
    static_cast<void>(::close(file));
  }
}

}  // namespace block_streamer_benchmarks
