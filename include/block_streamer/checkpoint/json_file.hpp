// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file.hpp>
#include <block_streamer/text/json_document.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

/// @brief Reads a whole small file.
/// @throws StorageError if it cannot be read; FormatError if it is larger than `byte_cap`.
[[nodiscard]] inline std::string read_small_file(const std::filesystem::path& path,
                                                 std::uint64_t byte_cap) {
  const File file = File::open(path);
  std::error_code error;
  const std::uint64_t size = file.size(error);
  if (!error && size > byte_cap) {
    throw FormatError{path.string(), "the file has " + std::to_string(size) +
                                         " bytes; files above " + std::to_string(byte_cap) +
                                         " are refused here"};
  }
  std::string text(error ? 0 : size, '\0');
  if (!error) error = file.read_at(0, std::as_writable_bytes(std::span{text}));
  if (error) throw StorageError{path.string(), "reading failed", error};
  return text;
}

namespace detail {
/// Text of a file for messages: control characters become '?'.
[[nodiscard]] inline std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}
}  // namespace detail

/// @brief Reads a JSON file and parses it as parse_json() does.
/// @throws StorageError if it cannot be read.
[[nodiscard]] inline nlohmann::json read_json_file(const std::filesystem::path& path,
                                                   std::uint64_t byte_cap = std::uint64_t{16}
                                                                            << 20) {
  const std::string text = read_small_file(path, byte_cap);
  return parse_json(text, path.string());
}

}  // namespace block_streamer::inline v1
