// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/range_summer.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/checkpoint/shard_manifest_writer.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1 {

/// Stored bytes are not those that were summed. **Text.** Names file and offset, block or tensor,
/// chunk, and both sums.
class ChecksumError : public Error {
 public:
  using Error::Error;
};

/// Called now and then with the number of bytes read since the last call.
using ByteProgress = std::function<void(std::uint64_t)>;

namespace detail {

inline constexpr std::size_t sum_piece_byte_count = std::size_t{4} << 20;

/// Reads a range of a file piece by piece. @throws StorageError naming file and offset.
template <class Use>
void read_pieces(const std::filesystem::path& path, ByteRange range, std::span<std::byte> buffer,
                 Use&& use) {
  const File file = File::open(path);
  for (std::uint64_t at = range.offset; at < range.end();) {
    const auto piece = buffer.first(
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), range.end() - at)));
    if (const std::error_code error = file.read_at(at, piece)) {
      throw StorageError{path.string() + ", offset " + std::to_string(at), "cannot be read", error};
    }
    use(piece);
    at += piece.size();
  }
}

/// "FILE, offset N": where byte `at` of the range's stream lies.
[[nodiscard]] inline std::string stream_place(const std::filesystem::path& folder,
                                              std::span<const SummedFile> files,
                                              const SummedRange& range, std::uint64_t at) {
  for (const FileRange& extent : range.extents) {
    if (at < extent.range.byte_count) {
      return (folder / files[extent.file].name).string() + ", offset " +
             std::to_string(extent.range.offset + at);
    }
    at -= extent.range.byte_count;
  }
  return folder.string();
}

[[nodiscard]] inline std::string sums_text(std::uint32_t expected, std::uint32_t found) {
  return "checksum " + crc_text(expected) + " expected, " + crc_text(found) + " found";
}

}  // namespace detail

/// @brief Sums the bytes that `range.extents` name. @param files  those that extents count into.
/// @throws StorageError naming file and offset if they cannot be read.
/// **Cost.** Reads them once, through 4 MiB of memory.
[[nodiscard]] inline SummedRange sum_range(SummedRange range,
                                           std::span<const std::filesystem::path> files,
                                           std::uint64_t chunk_byte_count,
                                           const ByteProgress& progress = {}) {
  RangeSummer summer{chunk_byte_count};
  std::vector<std::byte> buffer(detail::sum_piece_byte_count);
  for (const auto& [file, bytes] : range.extents) {
    detail::read_pieces(files[file], bytes, buffer, [&](std::span<const std::byte> piece) {
      summer.append(piece);
      if (progress) progress(piece.size());
    });
  }
  std::move(summer).finish(range);
  return range;
}

/// @brief Compares a range's stored bytes with its sums.
/// @param folder  of the manifest.
/// @throws ChecksumError naming the first chunk that differs; StorageError as sum_range().
inline void verify_range(const std::filesystem::path& folder, const ShardManifest& manifest,
                         const SummedRange& range, const ByteProgress& progress = {}) {
  std::vector<std::filesystem::path> paths;
  for (const SummedFile& file : manifest.files) paths.push_back(folder / file.name);
  const SummedRange found =
      sum_range({range.name, range.extents, 0, 0, {}}, paths, manifest.chunk_byte_count, progress);
  for (std::size_t i = 0; i < range.chunks.size(); ++i) {
    if (found.chunks[i] == range.chunks[i]) continue;
    const std::uint64_t at = i * manifest.chunk_byte_count;
    throw ChecksumError{detail::stream_place(folder, manifest.files, range, at) + " (" +
                        range.name + ", chunk at " + std::to_string(at) +
                        "): " + detail::sums_text(range.chunks[i], found.chunks[i])};
  }
}

/// @brief Compares a whole file with its size and its sum, if it has one.
/// @throws ChecksumError; StorageError if the file is not there or cannot be read.
inline void verify_file(const std::filesystem::path& folder, const SummedFile& file,
                        const ByteProgress& progress = {}) {
  const std::filesystem::path path = folder / file.name;
  std::error_code error;
  const std::uint64_t size = File::open(path).size(error);
  if (error) throw StorageError{path.string(), "cannot tell the size of the file", error};
  if (size != file.byte_count) {
    throw ChecksumError{path.string() + ": has " + std::to_string(size) + " bytes, by " +
                        std::string{manifest_file_name} + " it has " +
                        std::to_string(file.byte_count)};
  }
  if (!file.crc32c) return;
  std::uint32_t crc = 0;
  std::vector<std::byte> buffer(detail::sum_piece_byte_count);
  detail::read_pieces(path, {0, size}, buffer, [&](std::span<const std::byte> piece) {
    crc = crc32c(piece, crc);
    if (progress) progress(piece.size());
  });
  if (crc != *file.crc32c) {
    throw ChecksumError{path.string() + ": " + detail::sums_text(*file.crc32c, crc)};
  }
}

/// @brief Compares all that the manifest sums with what lies in the folder.
/// @returns one line for each file or range that differs; empty: all is as it was summed.
/// @throws StorageError if a file is not there or cannot be read. **Cost.** Reads every byte once.
[[nodiscard]] inline std::vector<std::string> verify_manifest(const std::filesystem::path& folder,
                                                              const ShardManifest& manifest,
                                                              const ByteProgress& progress = {}) {
  std::vector<std::string> faults;
  const auto collect = [&](auto&& check) {
    try {
      check();
      return true;
    } catch (const ChecksumError& error) {
      faults.emplace_back(error.what());
      return false;
    }
  };
  bool whole = true;  // a file that is right as a whole needs no look at its ranges
  for (const SummedFile& file : manifest.files) {
    whole = collect([&] { verify_file(folder, file, progress); }) && file.crc32c && whole;
  }
  for (const SummedFile& file : manifest.copied) {
    collect([&] { verify_file(folder, file, progress); });
  }
  for (const auto* ranges : {&manifest.blocks, &manifest.resident}) {
    for (const SummedRange& range : *ranges) {
      if (!whole) collect([&] { verify_range(folder, manifest, range, progress); });
    }
  }
  return faults;
}

/// @brief Sums a checkpoint as it lies: for verified reads of files that were never converted.
/// @param resident  full names of tensors outside blocks.
/// @throws BindingError, UnsupportedError as Checkpoint::at(); StorageError if bytes cannot be
/// read.
/// **Cost.** Reads the named tensors once.
[[nodiscard]] inline ShardManifest sum_checkpoint(const Checkpoint& checkpoint,
                                                  std::span<const BlockTensors> blocks,
                                                  std::span<const std::string> resident,
                                                  const ByteProgress& progress = {}) {
  ShardManifest manifest;
  for (const std::filesystem::path& path : checkpoint.files()) {
    std::error_code error;
    const std::uint64_t size = File::open(path).size(error);
    if (error) throw StorageError{path.string(), "cannot tell the size of the file", error};
    manifest.files.push_back({path.filename().string(), size, std::nullopt});
  }
  const auto sum = [&](SummedRange range) {
    return sum_range(std::move(range), checkpoint.files(), manifest.chunk_byte_count, progress);
  };
  const BlockMap map = make_block_map(checkpoint, blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    SummedRange range{blocks[i].prefix, {}, 0, 0, {}};
    for (const Extent& extent : map.blocks()[i].extents) {
      range.extents.push_back({extent.file, {extent.file_offset, extent.byte_count}});
    }
    manifest.blocks.push_back(sum(std::move(range)));
  }
  for (const std::string& name : resident) {
    const StoredTensor& tensor = checkpoint.at(name);
    SummedRange range{name, {}, 0, 0, {}};
    if (tensor.range.byte_count != 0) range.extents.push_back({tensor.file, tensor.range});
    manifest.resident.push_back(sum(std::move(range)));
  }
  return manifest;
}

}  // namespace block_streamer::inline v1
