// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/shard_folder.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1::detail {

/// Configuration, tokenizer, templates and licences; no weights, no program text.
[[nodiscard]] inline bool is_model_file(const std::string& name) {
  if (name.starts_with(".") || name.ends_with(".index.json") || name == manifest_file_name ||
      name == journal_file_name) {
    return false;
  }
  constexpr std::array<std::string_view, 5> endings{".json", ".jinja", ".txt", ".model", ".md"};
  constexpr std::array<std::string_view, 3> beginnings{"LICENSE", "NOTICE", "USE_POLICY"};
  return std::any_of(endings.begin(), endings.end(),
                     [&](std::string_view ending) { return name.ends_with(ending); }) ||
         std::any_of(beginnings.begin(), beginnings.end(),
                     [&](std::string_view begin) { return name.starts_with(begin); });
}

/// How a configuration spells the type.
[[nodiscard]] inline std::string_view config_name_of(DType type) noexcept {
  switch (type) {
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::f64:
      return "float64";
    default:
      return "float32";
  }
}

/// config.json of weights that were converted: other programs load them in the type it names.
[[nodiscard]] inline std::string with_dtype(const std::string& path, const std::string& text,
                                            DType type) {
  if (!parse_json(text, path).is_object()) throw FormatError{path, "not a JSON object"};
  nlohmann::ordered_json config = nlohmann::ordered_json::parse(text);  // keeps the order of keys
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (config.contains(key)) config[key] = config_name_of(type);
  }
  return config.dump(2) + "\n";
}

/// A model's files besides its weights, sorted. @throws StorageError
[[nodiscard]] inline std::vector<std::filesystem::path> model_files(
    const std::filesystem::path& from) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator at{from, error}, end; !error && at != end;
       at.increment(error)) {
    std::error_code ignored;
    if (at->is_regular_file(ignored) && is_model_file(at->path().filename().string())) {
      paths.push_back(at->path());
    }
  }
  if (error) throw StorageError{from.string(), "cannot list the folder", error};
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Copies a model's other files. @returns them with their sums, sorted by name.
/// @throws StorageError; FormatError for one of more than 256 MiB.
[[nodiscard]] inline std::vector<SummedFile> copy_model_files(const std::filesystem::path& from,
                                                              const std::filesystem::path& to,
                                                              std::optional<DType> dtype) {
  std::vector<SummedFile> copied;
  for (const std::filesystem::path& path : model_files(from)) {
    std::string text = read_small_file(path, std::uint64_t{256} << 20);
    const std::string name = path.filename().string();
    if (dtype && name == "config.json") text = with_dtype(path.string(), text, *dtype);
    atomic_replace(to / name, std::string_view{text});
    copied.push_back({name, text.size(), crc32c(std::as_bytes(std::span{text}))});
  }
  return copied;
}

}  // namespace block_streamer::inline v1::detail
