// SPDX-License-Identifier: Apache-2.0
// The peaks of a run's memory, as predicted and as they were.
#pragma once

#include "console.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace block_streamer_cli {

/// In bytes; nullopt: not known.
struct MemoryPeak {
  std::optional<std::uint64_t> predicted{};
  std::optional<std::uint64_t> measured{};
};

struct MemoryReport {
  std::optional<MemoryPeak> device{};       ///< nullopt: the device's memory is the host's
  std::optional<MemoryPeak> page_locked{};  ///< alike
  MemoryPeak rss;                           ///< of the process
};

/// @brief "device 1.20 GiB (predicted 1.15 GiB)"; empty if it was not measured.
[[nodiscard]] inline std::string words_for(const std::string& name, const MemoryPeak& peak) {
  if (!peak.measured) return {};
  return name + " " + readable_bytes(*peak.measured) +
         (peak.predicted ? " (predicted " + readable_bytes(*peak.predicted) + ")" : std::string{});
}

/// @brief Says the peaks in one line; nothing if the system tells none.
inline void say_memory(const MemoryReport& report) {
  std::string text;
  const auto add = [&](const std::string& name, const MemoryPeak& peak) {
    const std::string words = words_for(name, peak);
    if (!words.empty()) text += (text.empty() ? "" : ", ") + words;
  };
  if (report.device) add("device", *report.device);
  if (report.page_locked) add("page-locked", *report.page_locked);
  add("process", report.rss);
  if (!text.empty()) say("peak memory: " + text);
}

}  // namespace block_streamer_cli
