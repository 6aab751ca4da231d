// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/safetensors_parser.hpp>
#include <block_streamer/checkpoint/stored_tensor.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// Largest header that is read. A file of 1.3 million tensors has one of 126 MB.
inline constexpr std::uint64_t safetensors_header_cap = std::uint64_t{256} << 20;

/// What one safetensors file says about itself, every claim checked against the file's size.
struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;           ///< in the order of their bytes; `file` is 0
  std::vector<UnsupportedTensor> unsupported;  ///< in the order of their bytes; `file` is 0
  std::map<std::string, std::string> metadata;
  std::uint64_t file_byte_count = 0;
};

namespace detail {

/// The start of a file in quotes, for messages; only what prints.
[[nodiscard]] inline std::string quoted_start(std::string_view start) {
  std::string text;
  for (const char c : start.substr(0, 24)) {
    text += std::isprint(static_cast<unsigned char>(c)) != 0 ? c : '.';
  }
  return "'" + text + "'";
}

/// True if the eight bytes of the length are text: as a length they would be beyond any file.
[[nodiscard]] inline bool looks_like_text(std::string_view start) {
  if (start.starts_with("\xef\xbb\xbf")) start.remove_prefix(3);
  start = start.substr(0, 8);
  return !start.empty() && std::all_of(start.begin(), start.end(), [](char c) {
    return std::isprint(static_cast<unsigned char>(c)) != 0 || c == '\n' || c == '\r' || c == '\t';
  });
}

/// Names what the file is instead: a Git LFS pointer, a page of text, nothing at all.
inline void refuse_foreign_start(const std::string& path, std::string_view start,
                                 std::uint64_t file_size) {
  if (file_size == 0) throw FormatError{path, "the file is empty (0 bytes)"};
  if (start.starts_with("version https://git-lfs")) {
    throw FormatError{path, "this is a Git LFS pointer (" + std::to_string(file_size) +
                                " bytes of text), not the weights; fetch them with 'git lfs pull'"};
  }
  if (looks_like_text(start)) {
    throw FormatError{path, "not a safetensors file: it begins with " + quoted_start(start), 0};
  }
  if (file_size < 8) {
    throw FormatError{path, "the file is cut: it has " + std::to_string(file_size) +
                                " bytes, the header's length alone takes 8"};
  }
}

[[nodiscard]] inline std::uint64_t little_endian_u64(std::string_view bytes) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 8; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

/// The header's length, checked against the cap and the file's size before it is used.
inline std::uint64_t checked_header_size(const std::string& path, std::string_view start,
                                         std::uint64_t file_size) {
  const std::uint64_t size = little_endian_u64(start);
  const std::string sizes = "the header claims " + std::to_string(size) + " bytes, the file has " +
                            std::to_string(file_size);
  if (size > safetensors_header_cap) {
    throw FormatError{
        path, sizes + "; headers above " + std::to_string(safetensors_header_cap) + " are refused",
        0};
  }
  if (size > file_size - 8) throw FormatError{path, "the file is cut in its header: " + sizes, 0};
  if (size < 2) throw FormatError{path, sizes + "; a header has at least 2 ('{}')", 0};
  if (start.size() > 8 && start[8] != '{') {
    throw FormatError{path, "not a safetensors file: the header does not begin with '{'", 8};
  }
  return size;
}

/// Refuses data that ends after the file: a download cut short, or offsets that lie.
inline void check_complete(const std::string& path, std::span<const SafetensorsEntry> entries,
                           std::uint64_t data_begin, std::uint64_t file_size) {
  const auto last = std::max_element(entries.begin(), entries.end(),
                                     [](const auto& a, const auto& b) { return a.end < b.end; });
  if (last == entries.end() || last->end <= file_size - data_begin) return;
  const auto needed = checked_add(data_begin, last->end);
  throw FormatError{
      path,
      "the file is cut, or its header lies: tensor '" + last->name + "' ends at byte " +
          (needed ? std::to_string(*needed) : "2^64 or later") + " of the file, which has " +
          std::to_string(file_size) +
          (needed ? " bytes; " + std::to_string(*needed - file_size) + " are missing" : " bytes")};
}

/// Refuses overlaps, holes and bytes that no tensor owns. @pre entries sorted by (begin, end).
inline void check_tiling(const std::string& path, std::span<const SafetensorsEntry> entries,
                         std::uint64_t data_begin, std::uint64_t file_size) {
  std::uint64_t expected = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const SafetensorsEntry& entry = entries[i];
    if (entry.begin < expected) {
      throw FormatError{path,
                        "tensors '" + entries[i - 1].name + "' and '" + entry.name + "' overlap",
                        data_begin + entry.begin};
    }
    if (entry.begin > expected) {
      throw FormatError{path,
                        std::to_string(entry.begin - expected) + " bytes before tensor '" +
                            entry.name + "' belong to no tensor",
                        data_begin + expected};
    }
    expected = entry.end;
  }
  if (const std::uint64_t end = data_begin + expected; end != file_size) {
    throw FormatError{path,
                      std::to_string(file_size - end) +
                          " bytes follow the last tensor: by its header the file has " +
                          std::to_string(end) + " bytes, really " + std::to_string(file_size),
                      end};
  }
}

/// Refuses a name used twice; entries stay as they are.
inline void check_unique_names(const std::string& path, std::span<const SafetensorsEntry> entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw FormatError{path, "tensor '" + std::string{*twice} + "' is listed twice in the header"};
  }
}

/// Refuses offsets that differ from what shape and type take.
inline void check_size(const std::string& path, const SafetensorsEntry& entry, DType dtype) {
  const auto needed = dense_byte_count(dtype, entry.shape);
  if (needed && *needed == entry.end - entry.begin) return;
  throw FormatError{
      path, "tensor '" + entry.name + "' of shape " + to_string(entry.shape) + " and type " +
                entry.dtype + " takes " +
                (needed ? std::to_string(*needed) + " bytes" : "more than 2^64 bytes") +
                ", its offsets [" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) +
                "] cover " + std::to_string(entry.end - entry.begin)};
}

inline void append_entry(SafetensorsHeader& header, const std::string& path,
                         SafetensorsEntry&& entry, std::uint64_t data_begin) {
  const ByteRange range{data_begin + entry.begin, entry.end - entry.begin};
  if (const auto dtype = parse_dtype(entry.dtype)) {
    check_size(path, entry, *dtype);
    header.tensors.push_back({{std::move(entry.name), *dtype, std::move(entry.shape)}, 0, range});
  } else {
    header.unsupported.push_back(
        {std::move(entry.name), std::move(entry.dtype), 0, range, std::move(entry.shape)});
  }
}

}  // namespace detail

/// @brief Reads and checks the header of one safetensors file; no weight is read.
/// Checked: the length against the file and the cap, before anything is allocated; JSON; duplicate
/// keys; types and ranges of every field; size = shape × type in 64 bits; tensors tile the data
/// without holes, overlaps or trailing bytes (as the format's reference implementation demands, so
/// every path of this library accepts the same files). The data may begin at any byte.
/// @throws FormatError naming file, tensor and numbers, and what the file seems to be instead: a
/// Git LFS pointer, cut short, a text page.
/// @throws StorageError if the file cannot be opened or read.
/// **Cost.** One read of the header; O(n log n) in the number of tensors.
[[nodiscard]] inline SafetensorsHeader read_safetensors_header(const std::filesystem::path& path) {
  const std::string name = path.string();
  const File file = File::open(path);
  std::error_code error;
  const std::uint64_t file_size = file.size(error);
  const auto read = [&](std::uint64_t offset, std::span<char> out) {
    if (!error) error = file.read_at(offset, std::as_writable_bytes(out));
    if (error) throw StorageError{name, "reading the header failed", error};
  };
  std::array<char, 48> start{};
  const std::span<char> seen{start.data(), std::min<std::uint64_t>(start.size(), file_size)};
  read(0, seen);
  detail::refuse_foreign_start(name, {seen.data(), seen.size()}, file_size);
  const std::uint64_t header_size =
      detail::checked_header_size(name, {seen.data(), seen.size()}, file_size);
  std::string text(header_size, '\0');
  read(8, text);

  detail::ParsedSafetensors parsed = detail::parse_safetensors_json(name, text);
  const std::uint64_t data_begin = 8 + header_size;
  detail::check_unique_names(name, parsed.entries);
  std::sort(parsed.entries.begin(), parsed.entries.end(), [](const auto& a, const auto& b) {
    return std::pair{a.begin, a.end} < std::pair{b.begin, b.end};
  });
  detail::check_complete(name, parsed.entries, data_begin, file_size);
  detail::check_tiling(name, parsed.entries, data_begin, file_size);
  SafetensorsHeader header{{}, {}, std::move(parsed.metadata), file_size};
  header.tensors.reserve(parsed.entries.size());
  for (auto& entry : parsed.entries) {
    detail::append_entry(header, name, std::move(entry), data_begin);
  }
  return header;
}

}  // namespace block_streamer::inline v1
