// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/masters.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/core/block_image.hpp>
#include <block_streamer/os/huge_pages.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/storage_tier.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The RAM tier whose bytes are the caller's own tensors: parameters that train, and the
/// buffers beside them. Their memory is moved, once, into one region that can be page-locked and
/// copied from in one piece a block; the tensors, and whatever else views their storage, go on
/// using it there. No second copy.
/// A tensor that several blocks use lies in the region once.
/// **Threads.** As RamStorage; nobody writes a master while a copy of it may be in flight (the
/// streamer says when: after a backward, after a forward without grad).
/// **Lifetime.** The region lives as long as the last tensor in it.
/// **Cost.** One copy of each tensor at construction; memory for all, and for the largest twice.
class MasterStorage {
 public:
  /// @param blocks  per block, names relative to it. @throws as Masters.
  explicit MasterStorage(std::span<const std::vector<NamedTensor>> blocks)
      : masters_{std::make_shared<Masters>(blocks)} {
    const std::vector<std::uint64_t> begins = lay_out();
    move_masters(begins);
    for (std::size_t b = 0; b < blocks.size(); ++b) add_image(block_at(b), blocks[b], begins);
  }

  [[nodiscard]] std::size_t block_count() const noexcept { return images_.size(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return images_[index_of(block)];
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    read_from_memory(*this, block, range, out, std::move(done));
  }
  [[nodiscard]] std::span<const std::byte> bytes(BlockId block) const noexcept {
    const BlockImage& of_block = image(block);
    if (of_block.byte_count == 0) return {};
    return regions_.front().subspan(static_cast<std::size_t>(begins_[index_of(block)]),
                                    static_cast<std::size_t>(of_block.byte_count));
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept { return regions_; }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return to_string(PartId{block}) + ", image offset " + std::to_string(image_offset);
  }

  [[nodiscard]] const std::shared_ptr<Masters>& masters() const noexcept { return masters_; }

 private:
  /// Each master where its owner's tensors lie, in their order. @returns their places.
  [[nodiscard]] std::vector<std::uint64_t> lay_out() {
    std::vector<std::uint64_t> begins(masters_->all().size());
    std::uint64_t end = 0;
    for (std::uint32_t m = 0; m < begins.size(); ++m) {  // owners ascend with the masters
      begins[m] = round_up(end, tensor_alignment);
      end = begins[m] + (*masters_)[m].tensor.nbytes();
    }
    if (end == 0) return begins;
    pages_ = std::make_shared<HugePages>(static_cast<std::size_t>(end));
    regions_.push_back(pages_->bytes());
    return begins;
  }
  /// Below the storage of each tensor, so that all who share it move along.
  void move_masters(std::span<const std::uint64_t> begins) {
    for (std::uint32_t m = 0; m < begins.size(); ++m) {
      const at::Tensor& tensor = (*masters_)[m].tensor;
      if (tensor.nbytes() == 0) continue;
      std::byte* const to = regions_.front().data() + begins[m];
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
      auto keep = std::make_unique<std::shared_ptr<HugePages>>(pages_);
      tensor.storage().unsafeGetStorageImpl()->set_data_ptr(
          {to, keep.release(),
           [](void* held) { delete static_cast<std::shared_ptr<HugePages>*>(held); },
           at::Device{at::kCPU}});
    }
    masters_->settle();
  }
  /// The image is the window of the region that holds the block's tensors; in the slot they are
  /// packed. Neighbours in both are one segment.
  void add_image(BlockId block, std::span<const NamedTensor> named,
                 std::span<const std::uint64_t> begins) {
    BlockImage image;
    std::uint64_t window = UINT64_MAX, window_end = 0, slot_end = 0;
    const auto of_block = masters_->of(block);
    for (std::size_t i = 0; i < of_block.size(); ++i) {
      const at::Tensor& tensor = named[i].tensor;
      const TensorSpec spec{named[i].name, dtype_of(tensor.scalar_type()), shape_of(tensor)};
      const std::uint64_t byte_count = tensor.nbytes(), from = begins[of_block[i]];
      const std::uint64_t at = byte_count == 0 ? 0 : round_up(slot_end, tensor_alignment);
      image.layout.tensors.push_back({spec, 0, at, byte_count});
      if (byte_count == 0) continue;
      add_segment(image.segments, {from, at, byte_count});
      slot_end = at + byte_count;
      window = std::min(window, from);
      window_end = std::max(window_end, from + byte_count);
    }
    std::ranges::sort(image.segments, {}, &Segment::image_offset);
    for (Segment& segment : image.segments) segment.image_offset -= window;
    image.byte_count = window_end == 0 ? 0 : window_end - window;
    image.layout.slot_byte_count = {slot_end};
    image.part_begin = {0, static_cast<std::uint32_t>(image.segments.size())};
    begins_.push_back(window_end == 0 ? 0 : window);
    images_.push_back(std::move(image));
  }
  static void add_segment(std::vector<Segment>& segments, const Segment& next) {
    if (!segments.empty()) {
      Segment& last = segments.back();
      const std::uint64_t skipped = next.slot_offset - last.slot_offset;
      if (next.image_offset == last.image_offset + skipped) {  // the padding comes along
        last.byte_count = skipped + next.byte_count;
        return;
      }
    }
    segments.push_back(next);
  }

  std::shared_ptr<Masters> masters_;
  std::shared_ptr<HugePages> pages_;  // shared with the tensors that lie in it
  std::vector<std::span<std::byte>> regions_;
  std::vector<BlockImage> images_;
  std::vector<std::uint64_t> begins_;  ///< of each block's window, in the region
};
static_assert(addressable_tier<MasterStorage> && locating_tier<MasterStorage>);

/// @brief The RAM tier over the tensors that the blocks own, addressed in place.
/// @throws as Masters.
template <mastering_block Block>
[[nodiscard]] MasterStorage ram_storage_of(std::span<const Block> blocks) {
  std::vector<std::vector<NamedTensor>> tensors;
  for (const Block& block : blocks) tensors.push_back(block.masters());
  return MasterStorage{tensors};
}
template <mastering_block Block>
[[nodiscard]] MasterStorage ram_storage_of(const std::vector<Block>& blocks) {
  return ram_storage_of(std::span<const Block>{blocks});
}

}  // namespace block_streamer::inline v1
