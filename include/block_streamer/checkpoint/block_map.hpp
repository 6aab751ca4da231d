// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/extents.hpp>
#include <block_streamer/core/block_image.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// The tensors that make up one block of a checkpoint.
struct BlockTensors {
  std::string prefix;              ///< "model.layers.7.", with the trailing dot
  std::vector<std::string> names;  ///< relative to the prefix, each once
};

/// One block: its image, and the pieces of files that the image is made of.
struct BlockSource {
  BlockImage image;
  std::vector<Extent> extents;  ///< in image order, gapless from 0 to image.byte_count
};

/// @brief Which bytes of which files make up each block. Plain data, copyable; holds no file open.
class BlockMap {
 public:
  BlockMap() = default;
  /// @pre one prefix per block.
  BlockMap(std::vector<BlockSource> blocks, std::vector<std::filesystem::path> files,
           std::vector<std::string> prefixes)
      : blocks_{std::move(blocks)}, files_{std::move(files)}, prefixes_{std::move(prefixes)} {
    expects(prefixes_.size() == blocks_.size(), "a block map has one prefix per block");
  }

  [[nodiscard]] std::span<const BlockSource> blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::span<const std::filesystem::path> files() const noexcept { return files_; }
  /// @brief Per block, what the names of its tensors begin with.
  [[nodiscard]] const std::vector<std::string>& prefixes() const noexcept { return prefixes_; }

  /// @brief "FILE, offset N, tensor NAME (block 7)": where an image byte comes from, for messages.
  /// A byte between tensors, which rounding outwards takes in, is told by the tensor that follows.
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    const std::string place = to_string(PartId{block});
    if (index_of(block) >= blocks_.size()) return place + ", which does not exist";
    const BlockSource& source = blocks_[index_of(block)];
    const Extent* extent = extent_at(source.extents, image_offset);
    if (extent == nullptr) return place + ", image offset " + std::to_string(image_offset);
    std::string text = files_[extent->file].string() + ", offset " +
                       std::to_string(extent->file_offset + (image_offset - extent->image_offset));
    if (const TensorPlacement* tensor = tensor_at(source.image, image_offset)) {
      text += ", tensor " + prefixes_[index_of(block)] + tensor->spec.name;
    } else if (const TensorPlacement* next = tensor_after(source.image, *extent, image_offset)) {
      text += ", before tensor " + prefixes_[index_of(block)] + next->spec.name;
    }
    return text + " (" + place + ")";
  }

 private:
  [[nodiscard]] static const TensorPlacement* tensor_at(const BlockImage& image,
                                                        std::uint64_t image_offset) noexcept {
    for (const Segment& segment : image.segments) {
      if (image_offset - segment.image_offset >= segment.byte_count) continue;
      const std::uint64_t slot_offset = segment.slot_offset + (image_offset - segment.image_offset);
      for (const TensorPlacement& tensor : image.layout.tensors) {
        if (slot_offset - tensor.slot_offset < tensor.byte_count) return &tensor;
      }
    }
    return nullptr;
  }
  /// The first tensor of the extent that begins behind the byte.
  [[nodiscard]] static const TensorPlacement* tensor_after(const BlockImage& image,
                                                           const Extent& extent,
                                                           std::uint64_t image_offset) noexcept {
    const std::uint64_t end = extent.image_offset + extent.byte_count;
    for (const Segment& segment : image.segments) {  // sorted by image offset
      if (segment.image_offset <= image_offset) continue;
      return segment.image_offset < end ? tensor_at(image, segment.image_offset) : nullptr;
    }
    return nullptr;
  }

  std::vector<BlockSource> blocks_;
  std::vector<std::filesystem::path> files_;
  std::vector<std::string> prefixes_;
};

namespace detail {

/// The block's tensors in the order of their bytes. @throws BindingError, UnsupportedError
[[nodiscard]] inline std::vector<const StoredTensor*> tensors_in_file_order(
    const Checkpoint& checkpoint, const BlockTensors& block) {
  std::vector<const StoredTensor*> tensors;
  tensors.reserve(block.names.size());
  for (const std::string& name : block.names) {
    tensors.push_back(&checkpoint.at(block.prefix + name));
  }
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return std::tuple{a->file, a->range.offset, a->range.byte_count,
                      std::string_view{a->spec.name}} < std::tuple{b->file, b->range.offset,
                                                                   b->range.byte_count,
                                                                   std::string_view{b->spec.name}};
  });
  expects(std::adjacent_find(tensors.begin(), tensors.end()) == tensors.end(),
          "a block names each of its tensors once");
  return tensors;
}

/// Places the tensors one after another, each aligned. Those without elements are placed at 0: any
/// later place might lie beyond the slot's end.
[[nodiscard]] inline BlockLayout lay_out(std::span<const StoredTensor* const> tensors,
                                         std::size_t prefix_size) {
  BlockLayout layout;
  std::uint64_t end = 0;
  for (const StoredTensor* tensor : tensors) {
    TensorSpec spec = tensor->spec;
    spec.name.erase(0, prefix_size);
    const std::uint64_t byte_count = tensor->range.byte_count;
    const std::uint64_t begin = byte_count == 0 ? 0 : round_up(end, tensor_alignment);
    layout.tensors.push_back({std::move(spec), 0, begin, byte_count});
    end = std::max(end, begin + byte_count);
  }
  layout.slot_byte_count = {end};
  return layout;
}

/// Gaps of a file below this are read with what surrounds them: no tensor's padding is larger.
inline constexpr std::uint64_t bridged_gap = tensor_alignment;

/// The tensors' ranges, with small gaps between them. @pre tensors in file order.
[[nodiscard]] inline std::vector<FileRange> needed_ranges(
    std::span<const StoredTensor* const> tensors) {
  std::vector<FileRange> ranges;
  for (const StoredTensor* tensor : tensors) {
    if (tensor->range.byte_count == 0) continue;
    FileRange* last = ranges.empty() ? nullptr : &ranges.back();
    if (last != nullptr && last->file == tensor->file &&
        tensor->range.offset - last->range.end() < bridged_gap) {
      last->range.byte_count = tensor->range.end() - last->range.offset;
    } else {
      ranges.push_back({tensor->file, tensor->range});
    }
  }
  return ranges;
}

/// Copies from the extents to the slot; neighbours in both spaces become one.
[[nodiscard]] inline std::vector<Segment> make_segments(
    std::span<const StoredTensor* const> tensors, std::span<const Extent> extents,
    const BlockLayout& layout) {
  std::vector<Segment> segments;
  std::size_t at = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [offset, byte_count] = tensors[i]->range;
    if (byte_count == 0) continue;
    while (extents[at].file != tensors[i]->file ||
           extents[at].file_offset + extents[at].byte_count <= offset) {
      ++at;
    }
    const Segment next{extents[at].image_offset + (offset - extents[at].file_offset),
                       layout.tensors[i].slot_offset, byte_count};
    Segment* last = segments.empty() ? nullptr : &segments.back();
    // Files that pad their tensors as a slot does are copied in one piece, padding and all.
    if (last != nullptr &&
        next.image_offset - last->image_offset < last->byte_count + bridged_gap &&
        next.image_offset - last->image_offset == next.slot_offset - last->slot_offset) {
      last->byte_count = next.image_offset - last->image_offset + next.byte_count;
    } else {
      segments.push_back(next);
    }
  }
  return segments;
}

/// @param tensors  in file order. @param prefix_size  of their names, which the layout leaves out.
[[nodiscard]] inline BlockSource make_block_source(std::span<const StoredTensor* const> tensors,
                                                   std::size_t prefix_size,
                                                   std::uint32_t read_granularity) {
  BlockSource source;
  source.extents = make_extents(needed_ranges(tensors), read_granularity);
  BlockImage& image = source.image;
  image.read_granularity = read_granularity;
  image.layout = lay_out(tensors, prefix_size);
  image.segments = make_segments(tensors, source.extents, image.layout);
  image.part_begin = {0, static_cast<std::uint32_t>(image.segments.size())};
  if (!source.extents.empty()) {
    image.byte_count = source.extents.back().image_offset + source.extents.back().byte_count;
  }
  return source;
}

}  // namespace detail

/// @brief The block map of `blocks` over the checkpoint's files as they are: nothing is converted.
/// Image space: the block's byte ranges, adjacent ones joined, rounded outwards to the granularity,
/// in file order. Slot space: tensors in the same order, each at a multiple of 256, so neighbours
/// whose sizes are such multiples are one segment; so are those that a file pads to them. Gaps
/// below 256 bytes are read over. Tensors without elements have a placement, no segment and no
/// read. Blocks may straddle files, share tensors, begin at any byte, or be empty.
/// @throws BindingError, UnsupportedError as Checkpoint::at() for a tensor that cannot be used.
/// @pre names within a block are distinct; read_granularity >= 1.
[[nodiscard]] inline BlockMap make_block_map(const Checkpoint& checkpoint,
                                             std::span<const BlockTensors> blocks,
                                             std::uint32_t read_granularity = 1) {
  expects(read_granularity >= 1, "read_granularity is at least 1");
  std::vector<BlockSource> sources;
  std::vector<std::string> prefixes;
  for (const BlockTensors& block : blocks) {
    sources.push_back(detail::make_block_source(detail::tensors_in_file_order(checkpoint, block),
                                                block.prefix.size(), read_granularity));
    prefixes.push_back(block.prefix);
  }
  return {std::move(sources),
          {checkpoint.files().begin(), checkpoint.files().end()},
          std::move(prefixes)};
}

}  // namespace block_streamer::inline v1
