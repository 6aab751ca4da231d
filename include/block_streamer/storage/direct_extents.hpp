// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/aligned_block_map.hpp>
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/storage/extent_reader.hpp>
#include <block_streamer/storage/positional_file.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A reader over the map's files, past the page cache where their file systems allow it. The
/// map's images are rounded outwards to what that asks for, so that every read is aligned.
/// @throws StorageError if a file cannot be opened, or ends before bytes that a block needs.
[[nodiscard]] inline ExtentReader<PositionalFile> open_extents(BlockMap map, FileAccess access) {
  std::vector<PositionalFile> files;
  files.reserve(map.files().size());
  std::uint32_t alignment = 1;
  for (const std::filesystem::path& path : map.files()) {
    files.push_back(PositionalFile::open(path, access));
    alignment = std::max(alignment, files.back().alignment());  // powers of two
  }
  return {aligned_block_map(std::move(map), alignment), std::move(files)};
}

/// @brief How the files are read now, in words: "O_DIRECT, 512-byte blocks"
/// ("FILE_FLAG_NO_BUFFERING, …" on Windows), or "page cache (FILE: why)" for the first file that is
/// not read past it.
[[nodiscard]] inline std::string describe_access(const ExtentReader<PositionalFile>& reader) {
  std::uint32_t alignment = 1;
  for (std::size_t f = 0; f < reader.sources().size(); ++f) {
    const PositionalFile& file = reader.sources()[f];
    if (!file.direct()) {
      return "page cache (" + reader.block_map().files()[f].filename().string() + ": " +
             file.access_note() + ")";
    }
    alignment = std::max(alignment, file.alignment());
  }
  return std::string{PositionalFile::direct_words} + ", " + std::to_string(alignment) +
         "-byte blocks";
}

}  // namespace block_streamer::inline v1
