// SPDX-License-Identifier: Apache-2.0
#pragma once

// The platform twins declare the same members; this is the one place that chooses.
#if defined(_WIN32)
#include <block_streamer/os/atomic_replace_windows.hpp>
#elif defined(__unix__) || defined(__APPLE__)
#include <block_streamer/os/atomic_replace_posix.hpp>
#else
#error "block_streamer/os/atomic_replace.hpp: only POSIX systems and Windows are supported"
#endif

#include <cstddef>
#include <filesystem>
#include <string>

namespace block_streamer::inline v1 {

/// @brief True for the file beside its place that a killed process left of a ReplacingFile.
/// Meaningful only where nobody writes now.
[[nodiscard]] inline bool is_unfinished_part(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  const std::size_t part = name.rfind(".part");
  return name.starts_with('.') && part != std::string::npos && part + 5 < name.size() &&
         name.find_first_not_of("0123456789-", part + 5) == std::string::npos;
}

}  // namespace block_streamer::inline v1
