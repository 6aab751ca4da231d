// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>

#include <bit>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

namespace detail {

/// The eight digits of a sum; nullopt unless they are lower-case hexadecimal.
[[nodiscard]] inline std::optional<std::uint32_t> parse_crc(std::string_view text) noexcept {
  std::uint32_t value = 0;
  for (const char c : text) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return std::nullopt;
    value = value << 4U | static_cast<std::uint32_t>(digit);
  }
  return text.size() == 8 ? std::optional{value} : std::nullopt;
}

/// Reads the fields of a manifest, each checked for its type. Unknown keys are skipped: that is
/// part of what version 1 promises.
class ManifestReader {
 public:
  explicit ManifestReader(const std::string& path) : path_{path} {}

  [[nodiscard]] ShardManifest read(const nlohmann::json& json) {
    check_version(json);
    ShardManifest manifest;
    const std::string layout = string(json, "layout");
    if (layout != "packed" && layout != "original") fail("layout '" + printable(layout) + "'");
    if (layout == "packed") manifest.layout = ShardLayout::packed;
    if (string(json, "algorithm") != "crc32c") fail("an algorithm other than 'crc32c'");
    manifest.chunk_byte_count = number(json, "chunk_byte_count");
    if (!std::has_single_bit(manifest.chunk_byte_count) ||
        manifest.chunk_byte_count < packed_alignment || manifest.chunk_byte_count > largest_chunk) {
      fail("a chunk_byte_count that is no power of two from 4096 to 1 GiB");
    }
    std::set<std::string> names;
    for (const auto& entry : list(json, "files")) manifest.files.push_back(file(entry, names));
    for (const auto& entry : list(json, "copied")) manifest.copied.push_back(file(entry, names));
    const Crc32cJoin join{manifest.chunk_byte_count};
    for (const char* key : {"blocks", "resident"}) {
      auto& ranges = key[0] == 'b' ? manifest.blocks : manifest.resident;
      std::set<std::string> range_names;
      for (const auto& entry : list(json, key)) {
        ranges.push_back(range(entry, manifest, join));
        if (!range_names.insert(ranges.back().name).second)
          fail_range(ranges.back(), "is listed twice");
      }
    }
    if (json.contains("plan")) manifest.plan = string(json, "plan");
    return manifest;
  }

 private:
  static constexpr std::uint64_t largest_chunk = std::uint64_t{1} << 30;

  [[noreturn]] void fail(const std::string& what) const {
    throw FormatError{path_, "the manifest has " + what};
  }
  [[noreturn]] void fail_range(const SummedRange& range, const std::string& what) const {
    throw FormatError{path_, "'" + printable(range.name) + "' " + what};
  }

  /// First of all: what a newer version means by the other fields is not known here.
  void check_version(const nlohmann::json& json) const {
    if (!json.is_object() || string(json, "format") != "block_streamer manifest") {
      throw FormatError{path_, "this is no manifest of block_streamer"};
    }
    const std::uint64_t version = number(json, "version");
    if (version == 0) fail("version 0");
    if (version > manifest_version) {
      throw UnsupportedError{path_ + ": the manifest has version " + std::to_string(version) +
                             ", this program reads up to version " +
                             std::to_string(manifest_version) +
                             "; use a newer block_streamer, or convert the model again"};
    }
  }
  [[nodiscard]] const nlohmann::json& value(const nlohmann::json& json, const char* key) const {
    const auto found = json.find(key);
    if (found == json.end()) fail(std::string{"no '"} + key + "' where one belongs");
    return *found;
  }
  [[nodiscard]] const std::string& string(const nlohmann::json& json, const char* key) const {
    const nlohmann::json& found = value(json, key);
    if (!found.is_string()) fail(std::string{"a '"} + key + "' that is no text");
    return found.get_ref<const std::string&>();
  }
  [[nodiscard]] std::uint64_t number(const nlohmann::json& json, const char* key) const {
    const nlohmann::json& found = value(json, key);
    if (!found.is_number_unsigned()) fail(std::string{"a '"} + key + "' that is no whole number");
    return found.get<std::uint64_t>();
  }
  [[nodiscard]] const nlohmann::json& list(const nlohmann::json& json, const char* key) const {
    const nlohmann::json& found = value(json, key);
    if (!found.is_array()) fail(std::string{"a '"} + key + "' that is no list");
    for (const nlohmann::json& entry : found) {
      if (!entry.is_object()) fail(std::string{"an entry of '"} + key + "' that is no object");
    }
    return found;
  }
  [[nodiscard]] std::uint32_t crc(const nlohmann::json& json) const {
    const auto sum = parse_crc(string(json, "crc32c"));
    if (!sum) fail("a 'crc32c' that is not eight lower-case hexadecimal digits");
    return *sum;
  }

  [[nodiscard]] SummedFile file(const nlohmann::json& json, std::set<std::string>& names) const {
    SummedFile file{string(json, "name"), number(json, "byte_count"), std::nullopt};
    const bool plain = !file.name.empty() && file.name != "." && file.name != ".." &&
                       file.name.find_first_of(std::string_view{"/\\\0", 3}) == std::string::npos;
    if (!plain) fail("'" + printable(file.name) + "', which is no plain file name");
    if (!names.insert(file.name).second) fail("the file '" + printable(file.name) + "' twice");
    if (json.contains("crc32c")) file.crc32c = crc(json);
    return file;
  }

  [[nodiscard]] SummedRange range(const nlohmann::json& json, const ShardManifest& manifest,
                                  const Crc32cJoin& join) const {
    SummedRange range{string(json, "name"), {}, number(json, "byte_count"), crc(json), {}};
    read_extents(json, manifest, range);
    const std::string_view digits = string(json, "chunks");
    const std::uint64_t chunk = manifest.chunk_byte_count;
    const std::uint64_t count = range.byte_count / chunk + (range.byte_count % chunk != 0 ? 1 : 0);
    if (digits.size() % 8 != 0 || digits.size() / 8 != count) {
      fail_range(range, "has " + std::to_string(digits.size()) + " digits of chunk sums; " +
                            std::to_string(count) + " chunks have 8 each");
    }
    for (std::size_t at = 0; at < digits.size(); at += 8) {
      const auto sum = parse_crc(digits.substr(at, 8));
      if (!sum) fail_range(range, "has a chunk sum that is no lower-case hexadecimal number");
      range.chunks.push_back(*sum);
    }
    check_sums(range, chunk, join);
    return range;
  }

  void read_extents(const nlohmann::json& json, const ShardManifest& manifest,
                    SummedRange& range) const {
    const nlohmann::json& extents = value(json, "extents");
    if (!extents.is_array()) fail_range(range, "has extents that are no list");
    std::uint64_t total = 0;
    for (const nlohmann::json& entry : extents) {
      const FileRange extent = read_extent(entry, manifest, range);
      if (!range.extents.empty()) {
        const FileRange& last = range.extents.back();
        if (extent.file < last.file ||
            (extent.file == last.file && extent.range.offset < last.range.end())) {
          fail_range(range, "has extents that overlap or are not in order");
        }
      }
      range.extents.push_back(extent);
      const auto sum = checked_add(total, extent.range.byte_count);
      if (!sum) fail_range(range, "has extents of more than 2^64 bytes");
      total = *sum;
    }
    if (total != range.byte_count) {
      fail_range(range, "has " + std::to_string(range.byte_count) + " bytes, its extents " +
                            std::to_string(total));
    }
    const bool packed = manifest.layout == ShardLayout::packed;
    if (packed && range.extents.size() > 1) fail_range(range, "is packed in more than one piece");
    if (packed && total != 0 && range.extents[0].range.offset % packed_alignment != 0) {
      fail_range(range, "is packed at an offset that is no multiple of 4096");
    }
  }

  [[nodiscard]] FileRange read_extent(const nlohmann::json& entry, const ShardManifest& manifest,
                                      const SummedRange& range) const {
    const bool numbers = entry.is_array() && entry.size() == 3 && entry[0].is_number_unsigned() &&
                         entry[1].is_number_unsigned() && entry[2].is_number_unsigned();
    if (!numbers) fail_range(range, "has an extent that is not [file, offset, byte_count]");
    const auto file = entry[0].get<std::uint64_t>();
    const ByteRange bytes{entry[1].get<std::uint64_t>(), entry[2].get<std::uint64_t>()};
    if (file >= manifest.files.size()) {
      fail_range(range, "lies in file " + std::to_string(file) + ", which is not listed");
    }
    const auto end = checked_add(bytes.offset, bytes.byte_count);
    if (bytes.byte_count == 0 || !end || *end > manifest.files[file].byte_count) {
      fail_range(range, "has an extent that is empty or reaches beyond its file");
    }
    return {static_cast<std::uint32_t>(file), bytes};
  }

  /// A sum of the whole that does not follow from those of its chunks: the manifest is damaged.
  void check_sums(const SummedRange& range, std::uint64_t chunk, const Crc32cJoin& join) const {
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < range.chunks.size(); ++i) {
      const std::uint64_t rest = range.byte_count - i * chunk;
      sum = rest >= chunk ? join(sum, range.chunks[i]) : Crc32cJoin{rest}(sum, range.chunks[i]);
    }
    if (sum != range.crc32c) fail_range(range, "has chunk sums that do not make up its crc32c");
  }

  const std::string& path_;
};

}  // namespace detail

/// @brief Reads a manifest from its text; every field is checked in itself and against the others.
/// Whether the files are as it says, nobody knows until they are read.
/// @param path  for messages.
/// @throws FormatError naming the path and the fault.
/// @throws UnsupportedError if the manifest is of a newer version.
/// **Cost.** Linear in the text; per chunk a few operations, to see that the sums fit together.
[[nodiscard]] inline ShardManifest parse_shard_manifest(const std::string& path,
                                                        std::string_view text) {
  return detail::ManifestReader{path}.read(parse_json(text, path));
}

/// @brief The manifest of a checkpoint's folder; nullopt if it has none.
/// @throws StorageError if it cannot be read; what parse_shard_manifest() throws.
[[nodiscard]] inline std::optional<ShardManifest> find_shard_manifest(
    const std::filesystem::path& folder) {
  constexpr std::uint64_t byte_cap = std::uint64_t{256} << 20;  // about 2 TB of weights
  const std::filesystem::path path = folder / manifest_file_name;
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, ignored))) return std::nullopt;
  return parse_shard_manifest(path.string(), read_small_file(path, byte_cap));
}

}  // namespace block_streamer::inline v1
