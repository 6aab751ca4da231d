// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// @brief The value of a line "Key:   123 kB" of /proc/self/status, in bytes. @param key  with its
/// colon.
[[nodiscard]] inline std::optional<std::uint64_t> parse_status_line(std::string_view line,
                                                                    std::string_view key) {
  if (!line.starts_with(key)) return std::nullopt;
  line.remove_prefix(key.size());
  line.remove_prefix(line.find_first_not_of(" \t") == std::string_view::npos
                         ? line.size()
                         : line.find_first_not_of(" \t"));
  std::uint64_t kibibytes = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), kibibytes);
  if (error != std::errc{}) return std::nullopt;
  const auto rest = line.substr(static_cast<std::size_t>(end - line.data()));
  if (rest != " kB") return std::nullopt;
  return kibibytes * 1024;
}

namespace detail {
[[nodiscard]] inline std::optional<std::uint64_t> status_value(std::string_view key) {
  std::ifstream status{"/proc/self/status"};
  for (std::string line; std::getline(status, line);) {
    if (const auto value = parse_status_line(line, key)) return value;
  }
  return std::nullopt;
}
}  // namespace detail

/// @brief Memory of this process that is resident now, in bytes: its own and what it has mapped.
/// nullopt where the system has no /proc.
[[nodiscard]] inline std::optional<std::uint64_t> resident_memory() {
  return detail::status_value("VmRSS:");
}

/// @brief The most that resident_memory() has been since the program began. Unlike getrusage's
/// figure it does not begin with that of the process that started the program.
[[nodiscard]] inline std::optional<std::uint64_t> peak_resident_memory() {
  return detail::status_value("VmHWM:");
}

}  // namespace block_streamer::inline v1
