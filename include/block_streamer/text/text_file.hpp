// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The whole of a regular file.
/// @param limit largest size accepted, in bytes
/// @throws StorageError if it cannot be read; FormatError if it is larger than `limit`.
[[nodiscard]] inline std::string read_text_file(const std::filesystem::path& path,
                                                std::uint64_t limit = std::uint64_t{1} << 33U) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (error) throw StorageError{path.string(), "cannot be opened", error};
  if (std::filesystem::is_directory(status)) {
    throw StorageError{path.string(), "is a folder, not a file"};
  }
  std::ifstream in{path, std::ios::binary};
  if (!in) {
    throw StorageError{path.string(), "cannot be opened",
                       std::error_code{errno, std::generic_category()}};
  }
  std::string text;
  const auto size = std::filesystem::file_size(path, error);
  if (!error && size <= limit) text.reserve(size);
  std::vector<char> piece(std::size_t{1} << 16);  // a stack may be smaller than that
  while (in.read(piece.data(), static_cast<std::streamsize>(piece.size())), in.gcount() > 0) {
    text.append(piece.data(), static_cast<std::size_t>(in.gcount()));
    if (text.size() > limit) {
      throw FormatError{path.string(), "larger than " + std::to_string(limit) + " bytes"};
    }
  }
  if (in.bad()) throw StorageError{path.string(), "reading failed"};
  return text;
}

}  // namespace block_streamer::inline v1
