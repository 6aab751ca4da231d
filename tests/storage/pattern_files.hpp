// SPDX-License-Identifier: Apache-2.0
// Files whose bytes depend on their place, and a block map over them with everything awkward in it.
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>

#include <storage/tier_conformance.hpp>
#include <support/catch.hpp>
#include <support/fresh_folder.hpp>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace block_streamer::testing_support {

/// A folder that is gone afterwards.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(
      const std::filesystem::path& parent = std::filesystem::temp_directory_path())
      : path_{support::fresh_folder("block_streamer_storage_", parent)} {}
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  std::ofstream out{path, std::ios::binary};
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  REQUIRE(out.good());
}

/// Makes a file shorter. False where the system does not let a mapped file shrink: Windows.
inline bool cut_file(const std::filesystem::path& path, std::uintmax_t size) {
  std::error_code error;
  std::filesystem::resize_file(path, size, error);
#if !defined(_WIN32)
  REQUIRE_FALSE(error);
#endif
  return !error;
}

/// A block made of ranges of files, as a checkpoint would give it: one byte tensor per range.
inline BlockSource block_of(const std::vector<FileRange>& ranges, std::uint32_t granularity) {
  BlockSource source;
  source.extents = make_extents(ranges, granularity);
  source.image.read_granularity = granularity;
  std::uint64_t slot_end = 0;
  for (const auto& [file, range] : ranges) {
    for (const Extent& e : source.extents) {
      if (e.file != file || range.offset < e.file_offset ||
          range.offset >= e.file_offset + e.byte_count) {
        continue;
      }
      const std::uint64_t begin = round_up(slot_end, tensor_alignment);
      source.image.segments.push_back(
          {e.image_offset + (range.offset - e.file_offset), begin, range.byte_count});
      const std::string name = "t" + std::to_string(source.image.layout.tensors.size());
      source.image.layout.tensors.push_back(
          {{name, DType::u8, {range.byte_count}}, 0, begin, range.byte_count});
      slot_end = begin + range.byte_count;
    }
  }
  if (!source.extents.empty()) {
    source.image.byte_count = source.extents.back().image_offset + source.extents.back().byte_count;
  }
  source.image.layout.slot_byte_count = {slot_end};
  source.image.part_begin = {0, static_cast<std::uint32_t>(source.image.segments.size())};
  return source;
}

/// Three files of odd sizes; blocks at odd offsets, across files, up to the very end, and empty.
struct PatternFiles {
  explicit PatternFiles(std::uint32_t granularity = 1, const std::filesystem::path& parent =
                                                           std::filesystem::temp_directory_path())
      : folder{parent} {
    for (std::uint32_t f = 0; f < sizes.size(); ++f) {
      files.push_back(folder.path() / ("part " + std::to_string(f) + ".bin"));
      write_bytes(files.back(), pattern_bytes(f, 0, sizes[f]));
    }
    const std::vector<std::vector<FileRange>> blocks{
        {{0, {3, 1000}}, {0, {1003, 5}}, {0, {9001, 4097}}},
        {{1, {0, 4864}}},
        {},
        {{0, {sizes[0] - 777, 777}}, {2, {17, 3}}, {2, {sizes[2] - 40'001, 40'001}}},
        {{2, {100'000, 300'001}}},
    };
    std::vector<BlockSource> sources;
    std::vector<std::string> prefixes;
    for (const auto& ranges : blocks) {
      sources.push_back(block_of(ranges, granularity));
      prefixes.push_back("b" + std::to_string(prefixes.size()) + ".");
    }
    map = BlockMap{std::move(sources), files, std::move(prefixes)};
    for (const BlockSource& source : map.blocks()) images.push_back(expected(source));
  }

  /// What the files hold, and zeros beyond their ends.
  [[nodiscard]] Bytes expected(const BlockSource& source) const {
    Bytes image(static_cast<std::size_t>(source.image.byte_count));
    for (const Extent& e : source.extents) {
      for (std::uint64_t i = 0; i < e.byte_count && e.file_offset + i < sizes[e.file]; ++i) {
        image[static_cast<std::size_t>(e.image_offset + i)] = pattern(e.file, e.file_offset + i);
      }
    }
    return image;
  }

  TemporaryFolder folder;
  std::vector<std::size_t> sizes{20'011, 4864, 1'048'577};
  std::vector<std::filesystem::path> files;
  BlockMap map;
  Images images;
};

}  // namespace block_streamer::testing_support
