// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory_report.hpp"

#include <block_streamer/os/process_memory.hpp>

#include <cstdint>
#include <functional>

namespace block_streamer_cli {

/// @brief The peaks so far, nothing predicted. @param torch_peak  the most device memory that
/// LibTorch has had; empty: it is the host's.
template <class Backend>
[[nodiscard]] MemoryReport measured_memory(const Backend& backend,
                                           const std::function<std::uint64_t()>& torch_peak) {
  MemoryReport report;
  report.rss.measured = block_streamer::peak_resident_memory();
  if constexpr (requires { backend.device_memory(); }) {
    report.device.emplace().measured =
        backend.device_memory().peak + (torch_peak ? torch_peak() : 0);
    report.page_locked.emplace().measured = backend.page_locked_memory().peak;
  }
  return report;
}

}  // namespace block_streamer_cli
