// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// Memory of one control group, in bytes.
struct CgroupMemory {
  std::optional<std::uint64_t> limit;  ///< nullopt: unlimited
  std::uint64_t usage = 0;             ///< without page cache that can be dropped
};

namespace detail {

[[nodiscard]] inline std::optional<std::string> read_pseudo_file(
    const std::filesystem::path& path) {
  std::ifstream in{path, std::ios::binary};
  if (!in) return std::nullopt;
  return std::string{std::istreambuf_iterator<char>{in}, {}};
}

/// The number at the start of the text after blanks.
[[nodiscard]] inline std::optional<std::uint64_t> leading_number(std::string_view text) noexcept {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end != text.data() ? std::optional{value} : std::nullopt;
}

/// The number of the line that begins with `key` and a separator.
[[nodiscard]] inline std::optional<std::uint64_t> number_of(std::string_view text,
                                                            std::string_view key) noexcept {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.size() > key.size() && line.starts_with(key) &&
        (line[key.size()] == ':' || line[key.size()] == ' ')) {
      return leading_number(line.substr(key.size() + 1));
    }
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  return std::nullopt;
}

[[nodiscard]] inline std::optional<std::uint64_t> number_in(const std::filesystem::path& path) {
  const auto text = read_pseudo_file(path);
  return text ? leading_number(*text) : std::nullopt;
}

/// The process's path in the controller's hierarchy, from the text of /proc/self/cgroup. The
/// unified hierarchy (version 2) has an empty controller list.
[[nodiscard]] inline std::optional<std::string> cgroup_path(std::string_view text,
                                                            std::string_view controller) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    std::string_view list = line.substr(first + 1, second - first - 1);
    for (bool more = true; more;) {
      const std::size_t comma = list.find(',');
      if (list.substr(0, comma) == controller) return std::string{line.substr(second + 1)};
      more = comma != std::string_view::npos;
      if (more) list.remove_prefix(comma + 1);
    }
  }
  return std::nullopt;
}
}  // namespace detail

/// @brief MemAvailable of a text like /proc/meminfo, in bytes.
[[nodiscard]] inline std::optional<std::uint64_t> parse_available_memory(std::string_view meminfo) {
  const auto kibibytes = detail::number_of(meminfo, "MemAvailable");
  return kibibytes ? std::optional{*kibibytes * 1024} : std::nullopt;
}

/// @brief Memory of the control group in `folder`, version 2 (memory.max) or 1
/// (memory.limit_in_bytes). nullopt if it is neither. Version 1 spells "unlimited" as a huge
/// number.
[[nodiscard]] inline std::optional<CgroupMemory> read_cgroup_memory(
    const std::filesystem::path& folder) {
  const bool unified = detail::read_pseudo_file(folder / "memory.max").has_value();
  const auto limit = detail::number_in(folder / (unified ? "memory.max" : "memory.limit_in_bytes"));
  const auto used =
      detail::number_in(folder / (unified ? "memory.current" : "memory.usage_in_bytes"));
  if (!unified && !limit) return std::nullopt;
  const std::string stat = detail::read_pseudo_file(folder / "memory.stat").value_or("");
  const std::uint64_t cache =
      detail::number_of(stat, unified ? "inactive_file" : "total_inactive_file").value_or(0);
  CgroupMemory memory{limit, used.value_or(0) - std::min(cache, used.value_or(0))};
  if (limit && *limit > std::uint64_t{1} << 60) memory.limit.reset();
  return memory;
}

/// @brief Bytes that may still be used under the limits of the group at `path` below `root` and all
/// its ancestors: a parent's limit binds too. nullopt: no limit.
[[nodiscard]] inline std::optional<std::uint64_t> cgroup_headroom(const std::filesystem::path& root,
                                                                  std::filesystem::path path) {
  std::optional<std::uint64_t> least;
  path = path.relative_path();
  while (true) {
    if (const auto memory = read_cgroup_memory(path.empty() ? root : root / path);
        memory && memory->limit) {
      const std::uint64_t room = *memory->limit - std::min(memory->usage, *memory->limit);
      least = std::min(room, least.value_or(room));
    }
    if (path.empty()) return least;
    path = path.parent_path();
  }
}

/// @brief Bytes of memory that this process can still take without swapping or being killed: what
/// the system has available, within the limits of its control groups. nullopt if nothing is known.
/// @param root  where /proc and /sys are found; another one for tests.
[[nodiscard]] inline std::optional<std::uint64_t> available_memory(
    const std::filesystem::path& root = "/") {
  std::optional<std::uint64_t> available;
  if (const auto text = detail::read_pseudo_file(root / "proc/meminfo")) {
    available = parse_available_memory(*text);
  }
  const auto lower = [&available](std::optional<std::uint64_t> other) {
    if (other) available = std::min(*other, available.value_or(*other));
  };
  const std::string groups = detail::read_pseudo_file(root / "proc/self/cgroup").value_or("");
  const std::filesystem::path mount = root / "sys/fs/cgroup";
  // In a container the path names a place outside the visible tree: the root then is the own group.
  if (const auto path = detail::cgroup_path(groups, "")) lower(cgroup_headroom(mount, *path));
  if (const auto path = detail::cgroup_path(groups, "memory")) {
    lower(cgroup_headroom(mount / "memory", *path));
  }
  return available;
}

/// @brief How much of `available` memory weights may fill: less 2 GiB or 15 %, whichever is more.
[[nodiscard]] constexpr std::uint64_t fillable_memory(std::uint64_t available) noexcept {
  const std::uint64_t margin = std::max(std::uint64_t{2} << 30, available / 100 * 15);
  return available - std::min(available, margin);
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
