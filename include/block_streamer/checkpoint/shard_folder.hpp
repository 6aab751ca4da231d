// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/core/error.hpp>

#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace block_streamer::inline v1 {

/// Where a conversion notes its progress; gone when it is complete.
inline constexpr std::string_view journal_file_name = "block_streamer.convert.json";

/// Names of tensors that only fill a packed file up to the next aligned offset.
inline constexpr std::string_view shard_padding_prefix = "block_streamer.padding.";

/// @brief True for the tensors that fill gaps of packed files: they belong to no model.
[[nodiscard]] inline bool is_shard_padding(std::string_view tensor) noexcept {
  return tensor.starts_with(shard_padding_prefix);
}

/// @brief A folder that a conversion is still being written into lacks files of all kinds: it is
/// asked for this before any of them is missed.
/// @throws FormatError if a conversion into the folder has not ended.
inline void expect_conversion_ended(const std::filesystem::path& folder) {
  std::error_code ignored;
  if (std::filesystem::exists(folder / journal_file_name, ignored) &&
      !std::filesystem::exists(folder / manifest_file_name, ignored)) {
    throw FormatError{folder.string(),
                      "a conversion into this folder has not ended; run convert again, it goes on "
                      "where it stopped"};
  }
}

}  // namespace block_streamer::inline v1
