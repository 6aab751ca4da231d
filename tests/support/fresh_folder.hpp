// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <random>
#include <string>

namespace support {

/// A new, empty folder in `parent`, with a name that nothing had before.
[[nodiscard]] inline std::filesystem::path fresh_folder(
    const std::string& prefix,
    const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
  std::random_device random;
  for (;;) {
    const std::filesystem::path folder =
        parent / (prefix + std::to_string(random()) + std::to_string(random()));
    if (std::filesystem::create_directory(folder)) return folder;
  }
}

}  // namespace support
