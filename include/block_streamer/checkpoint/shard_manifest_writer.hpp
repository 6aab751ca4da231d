// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/core/config.hpp>

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

namespace detail {

inline void append_crc(std::string& text, std::uint32_t crc) {
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[crc >> shift & 0xfU];
}
[[nodiscard]] inline std::string crc_text(std::uint32_t crc) {
  std::string text;
  append_crc(text, crc);
  return text;
}

[[nodiscard]] inline nlohmann::ordered_json to_json(const SummedFile& file) {
  nlohmann::ordered_json json{{"name", file.name}, {"byte_count", file.byte_count}};
  if (file.crc32c) json["crc32c"] = crc_text(*file.crc32c);
  return json;
}

[[nodiscard]] inline nlohmann::ordered_json to_json(const SummedRange& range) {
  nlohmann::ordered_json extents = nlohmann::ordered_json::array();
  for (const FileRange& extent : range.extents) {
    extents.push_back({extent.file, extent.range.offset, extent.range.byte_count});
  }
  std::string chunks;
  chunks.reserve(range.chunks.size() * 8);
  for (const std::uint32_t crc : range.chunks) append_crc(chunks, crc);
  return {{"name", range.name},
          {"byte_count", range.byte_count},
          {"crc32c", crc_text(range.crc32c)},
          {"extents", std::move(extents)},
          {"chunks", std::move(chunks)}};
}

template <class Entries>
[[nodiscard]] nlohmann::ordered_json list_of(const Entries& entries) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const auto& entry : entries) list.push_back(to_json(entry));
  return list;
}

}  // namespace detail

/// @brief The text of block_streamer.json; the same manifest gives the same bytes.
/// **Cost.** About 9 bytes of text a chunk.
[[nodiscard]] inline std::string format_shard_manifest(const ShardManifest& manifest) {
  nlohmann::ordered_json json{
      {"format", "block_streamer manifest"},
      {"version", manifest_version},
      {"layout", manifest.layout == ShardLayout::packed ? "packed" : "original"},
      {"written_by", "block_streamer " + std::string{version_string}},
      {"algorithm", "crc32c"},
      {"chunk_byte_count", manifest.chunk_byte_count},
      {"files", detail::list_of(manifest.files)},
      {"copied", detail::list_of(manifest.copied)},
      {"resident", detail::list_of(manifest.resident)},
      {"blocks", detail::list_of(manifest.blocks)}};
  if (!manifest.plan.empty()) json["plan"] = manifest.plan;
  // A file's name need not be UTF-8; its sums are then not found again.
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace block_streamer::inline v1
