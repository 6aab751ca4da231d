// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file.hpp>

#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
/// The JSON parser takes a NUL for the end of its input: what follows would go unchecked.
inline void refuse_nul(const std::string& path, std::string_view text, std::uint64_t text_begin) {
  if (const auto at = text.find('\0'); at != std::string_view::npos) {
    throw FormatError{path, "not valid JSON: a zero byte", text_begin + at};
  }
}

/// Text of a file for messages: control characters become '?'.
[[nodiscard]] inline std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

/// Parser callback: nothing nested deeper than 64, no key twice in one object.
class StrictJson {
 public:
  explicit StrictJson(const std::string& path) : path_{path} {}
  bool operator()(int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > 64) throw FormatError{path_, "the JSON is nested deeper than 64"};
    if (event == Event::object_start) keys_.emplace_back();
    if (event == Event::object_end) keys_.pop_back();
    if (event == Event::key && !keys_.back().insert(value.get<std::string>()).second) {
      throw FormatError{path_, "key '" + value.get<std::string>() + "' is listed twice"};
    }
    return true;
  }

 private:
  const std::string& path_;
  std::vector<std::set<std::string>> keys_;
};
}  // namespace detail

/// @brief Parses JSON that nobody vouches for: UTF-8, nesting and duplicate keys are checked.
/// @param path  for messages.
/// @throws FormatError naming the path and, for a syntax error, the byte.
[[nodiscard]] inline nlohmann::json parse_json(const std::string& path, std::string_view text) {
  if (text.starts_with("version https://git-lfs")) {
    throw FormatError{path, "this is a Git LFS pointer; fetch the file with 'git lfs pull'"};
  }
  detail::refuse_nul(path, text, 0);
  try {
    return nlohmann::json::parse(text.begin(), text.end(), detail::StrictJson{path});
  } catch (const nlohmann::json::parse_error& error) {
    throw FormatError{path, "not valid JSON", error.byte == 0 ? 0 : error.byte - 1};
  } catch (const nlohmann::json::exception& error) {
    throw FormatError{path, std::string{"not valid JSON: "} + error.what()};
  }
}

/// @copydoc parse_json
/// Reads the file first. @throws StorageError if it cannot be read.
[[nodiscard]] inline nlohmann::json read_json_file(const std::filesystem::path& path,
                                                   std::uint64_t byte_cap = std::uint64_t{16}
                                                                            << 20) {
  const std::string text = read_small_file(path, byte_cap);
  return parse_json(path.string(), std::string_view{text});
}

}  // namespace block_streamer::inline v1
