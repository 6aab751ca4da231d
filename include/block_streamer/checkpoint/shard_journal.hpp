// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/shard_folder.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/checkpoint/shard_manifest_reader.hpp>
#include <block_streamer/checkpoint/shard_manifest_writer.hpp>
#include <block_streamer/checkpoint/shard_plan.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

/// @brief Tells conversions apart: what goes where, and size and time of every source file.
/// @throws StorageError if the system does not tell them.
[[nodiscard]] inline std::string plan_identity(std::span<const PackedShard> shards,
                                               std::span<const std::filesystem::path> sources) {
  nlohmann::json text = nlohmann::json::array();
  for (const std::filesystem::path& source : sources) {
    std::error_code error;
    const auto time = std::filesystem::last_write_time(source, error).time_since_epoch().count();
    const auto size = error ? 0 : std::filesystem::file_size(source, error);
    if (error) throw StorageError{source.string(), "cannot tell size and time of the file", error};
    text.push_back({source.filename().string(), size, time});
  }
  for (const PackedShard& shard : shards) {
    text.push_back(shard.file_name);
    text.push_back(shard.header);
    for (const PackedGroup& group : shard.groups) {
      for (const PackedTensor& tensor : group.tensors) {
        text.push_back({tensor.source.file, tensor.source.range.offset});
        text.push_back({group.name, tensor.from ? name_of(*tensor.from) : ""});
      }
    }
  }
  const std::string whole =
      text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // odd file names
  return detail::crc_text(crc32c(std::as_bytes(std::span{whole}))) + "-" +
         std::to_string(whole.size());
}

/// @brief What an unfinished conversion has done so far: the manifest of the files written. nullopt
/// if there is none, or none that can be read: then nothing of what it says counts.
[[nodiscard]] inline std::optional<ShardManifest> find_shard_journal(
    const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / journal_file_name;
  try {
    const std::string text = read_small_file(path, std::uint64_t{256} << 20);
    return parse_shard_manifest(path.string(), text);
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// @brief Replaces the journal as a whole. @throws StorageError
inline void write_shard_journal(const std::filesystem::path& folder,
                                const ShardManifest& manifest) {
  atomic_replace(folder / journal_file_name, std::string_view{format_shard_manifest(manifest)});
}

}  // namespace block_streamer::inline v1
