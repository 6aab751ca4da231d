// SPDX-License-Identifier: Apache-2.0
// What a saved training state says of its run, without its tensors.
#pragma once

#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/safetensors_header.hpp>
#include <block_streamer/core/error.hpp>

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

namespace block_streamer::inline v1 {

/// How far a run has come. What a step draws and which rows it takes follow from its number.
struct RunPosition {
  std::uint64_t step = 0;     ///< finished steps, skipped ones included; 0: nothing is saved yet
  std::uint64_t skipped = 0;  ///< of them, those that were not finite
};

/// What a state says of its run.
struct SavedRun {
  RunPosition position;
  std::map<std::string, std::string> record;  ///< RunRecord's fields
};

namespace detail {

inline constexpr const char* state_format = "block_streamer training state 2";

inline constexpr const char* metadata_sum_key = "metadata crc32c";

/// Of every field but itself, keys, values and where one ends: a changed step or record is seen.
[[nodiscard]] inline std::uint32_t sum_of(const std::map<std::string, std::string>& metadata) {
  std::string all;
  for (const auto& [key, value] : metadata) {
    if (key == metadata_sum_key) continue;
    for (const std::string* text : {&key, &value})
      all += std::to_string(text->size()) + " " + *text;
  }
  return crc32c(std::as_bytes(std::span{all}));
}

[[nodiscard]] inline std::uint64_t state_number(const std::filesystem::path& path,
                                                const std::map<std::string, std::string>& metadata,
                                                const std::string& key) {
  const auto found = metadata.find(key);
  const std::string text = found == metadata.end() ? std::string{} : found->second;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw FormatError{path.string(), "'" + key + "' in its metadata is no whole number"};
  }
  return value;
}

inline void expect_unchanged_metadata(const std::filesystem::path& path,
                                      const std::map<std::string, std::string>& metadata) {
  if (sum_of(metadata) == state_number(path, metadata, metadata_sum_key)) return;
  throw FormatError{path.string(),
                    "the file has changed since it was saved: its metadata has another crc32c"};
}

}  // namespace detail

/// @brief What the state at `path` says of its run; nullopt if there is no file.
/// @throws FormatError if it is no such state or what it says has changed since it was saved;
/// StorageError if it cannot be read.
[[nodiscard]] inline std::optional<SavedRun> read_saved_run(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  const SafetensorsHeader header = read_safetensors_header(path);
  const auto format = header.metadata.find("format");
  if (format == header.metadata.end() || format->second != detail::state_format) {
    throw FormatError{path.string(),
                      std::string{"not a \""} + detail::state_format + "\" by its metadata"};
  }
  detail::expect_unchanged_metadata(path, header.metadata);
  SavedRun run;
  run.position = {.step = detail::state_number(path, header.metadata, "step"),
                  .skipped = detail::state_number(path, header.metadata, "skipped")};
  constexpr std::string_view prefix = "run ";
  for (const auto& [key, value] : header.metadata) {
    if (key.starts_with(prefix)) run.record.emplace(key.substr(prefix.size()), value);
  }
  return run;
}

}  // namespace block_streamer::inline v1
