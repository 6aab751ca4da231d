// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/os/huge_pages.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/read_place.hpp>
#include <block_streamer/storage/read_threads.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The image whose bytes are the slots themselves, one after another: a segment per part.
/// @pre parts and slot sizes as BlockLayout describes them.
[[nodiscard]] inline BlockImage image_of_layout(BlockLayout layout) {
  BlockImage image;
  image.part_begin.assign(1, 0);
  for (const std::uint64_t byte_count : layout.slot_byte_count) {
    if (byte_count != 0) {
      const std::uint64_t begin = round_up(image.byte_count, tensor_alignment);
      image.segments.push_back({begin, 0, byte_count});
      image.byte_count = begin + byte_count;
    }
    image.part_begin.push_back(static_cast<std::uint32_t>(image.segments.size()));
  }
  image.layout = std::move(layout);
  return image;
}

namespace detail {

/// Hands out pieces of work to threads and keeps the first failure.
class PieceQueue {
 public:
  struct Piece {
    BlockId block;
    ByteRange range;
  };
  explicit PieceQueue(std::vector<Piece> pieces) : pieces_{std::move(pieces)} {}

  [[nodiscard]] std::optional<Piece> next() {
    const std::scoped_lock lock{mutex_};
    if (failure_ || next_ == pieces_.size()) return std::nullopt;
    return pieces_[next_++];
  }
  void fail(const Piece& piece, std::error_code error) {
    const std::scoped_lock lock{mutex_};
    if (!failure_) failure_.emplace(piece, error);
  }
  /// Of the first piece that failed. @pre the threads have ended.
  [[nodiscard]] const std::optional<std::pair<Piece, std::error_code>>& failure() const noexcept {
    return failure_;
  }

 private:
  std::mutex mutex_;  // guards everything below
  std::vector<Piece> pieces_;
  std::size_t next_ = 0;
  std::optional<std::pair<Piece, std::error_code>> failure_;
};

}  // namespace detail

/// @brief Block images in host memory: nothing is staged, and where the memory can be page-locked
/// nothing is copied on the host. Filled from a checkpoint's files, or by the caller.
/// **Threads.** Reads from any, at once; they complete inside async_read. Writing is the caller's:
/// never while a pass may read the same block.
/// **Cost.** One region for all blocks, each at a multiple of 256, in huge pages where the system
/// grants them: the payload and less than 256 bytes a block.
class RamStorage {
 public:
  /// @brief Reads the map's blocks, `threads` files' pieces at a time.
  /// @throws StorageError naming file, offset and tensor if a read fails, or if memory is short.
  [[nodiscard]] static RamStorage load(BlockMap map, std::size_t threads = default_read_threads()) {
    expects(threads >= 1, "loading needs a thread");
    ExtentReader<PositionalFile> reader{std::move(map)};
    std::vector<BlockImage> images;
    for (const BlockSource& source : reader.block_map().blocks()) images.push_back(source.image);
    RamStorage storage{std::move(images)};
    storage.fill_from(reader, threads);
    storage.map_ = reader.block_map();
    return storage;
  }

  /// @brief Blocks of these layouts, all zeros until the caller writes them. @see image_of_layout
  explicit RamStorage(std::vector<BlockLayout> layouts)
      : RamStorage{images_of(std::move(layouts))} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return images_.size(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return images_[index_of(block)];
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    read_from_memory(*this, block, range, out, std::move(done));
  }
  [[nodiscard]] std::span<const std::byte> bytes(BlockId block) const noexcept {
    return mutable_bytes(block);
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept { return regions_; }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    if (map_) return map_->locate(block, image_offset);
    return to_string(PartId{block}) + ", image offset " + std::to_string(image_offset);
  }

  /// @brief The block's image, to be filled. **Lifetime.** The storage's; stable under moves.
  /// @throws ContractViolation if there is no such block.
  [[nodiscard]] std::span<std::byte> writable_bytes(BlockId block) {
    expects(index_of(block) < images_.size(), "there is no such block");
    return mutable_bytes(block);
  }
  /// @brief The bytes of one tensor, to be filled. @pre `tensor` is of this block's layout, and the
  /// storage was made of layouts, so that a tensor lies in one piece.
  /// @throws ContractViolation if that is not so.
  [[nodiscard]] std::span<std::byte> writable_bytes(BlockId block, const TensorPlacement& tensor) {
    const std::span<std::byte> image_bytes = writable_bytes(block);
    if (tensor.byte_count == 0) return {};
    const BlockImage& from = image(block);
    expects(tensor.part < from.part_count(), "the tensor is of another block");
    for (std::uint32_t i = from.part_begin[tensor.part]; i < from.part_begin[tensor.part + 1];
         ++i) {
      const Segment& s = from.segments[i];
      const std::uint64_t skipped = tensor.slot_offset - s.slot_offset;
      if (tensor.slot_offset < s.slot_offset || skipped > s.byte_count ||
          tensor.byte_count > s.byte_count - skipped) {
        continue;
      }
      return image_bytes.subspan(static_cast<std::size_t>(s.image_offset + skipped),
                                 static_cast<std::size_t>(tensor.byte_count));
    }
    expects(false, "the tensor does not lie in one piece of the block's image");
    return {};
  }

 private:
  static constexpr std::uint64_t piece_byte_count = std::uint64_t{8} << 20;

  explicit RamStorage(std::vector<BlockImage> images) : images_{std::move(images)} {
    std::uint64_t end = 0;
    for (const BlockImage& one : images_) {
      begins_.push_back(round_up(end, tensor_alignment));
      end = begins_.back() + one.byte_count;
    }
    if (end == 0) return;
    pages_ = HugePages{static_cast<std::size_t>(end)};
    regions_.push_back(pages_.bytes());
  }

  static std::vector<BlockImage> images_of(std::vector<BlockLayout> layouts) {
    std::vector<BlockImage> images;
    images.reserve(layouts.size());
    for (BlockLayout& layout : layouts) images.push_back(image_of_layout(std::move(layout)));
    return images;
  }

  [[nodiscard]] std::span<std::byte> mutable_bytes(BlockId block) const noexcept {
    const auto byte_count = static_cast<std::size_t>(image(block).byte_count);
    if (byte_count == 0) return {};
    return regions_.front().subspan(static_cast<std::size_t>(begins_[index_of(block)]), byte_count);
  }

  void fill_from(ExtentReader<PositionalFile>& reader, std::size_t threads) {
    detail::PieceQueue queue{pieces()};
    const auto work = [&]() noexcept {
      while (const auto piece = queue.next()) {
        const auto out = mutable_bytes(piece->block)
                             .subspan(static_cast<std::size_t>(piece->range.offset),
                                      static_cast<std::size_t>(piece->range.byte_count));
        const auto error = detail::read_or_map(reader, piece->block, piece->range, out);
        if (error) queue.fail(*piece, error);
      }
    };
    {
      std::vector<std::jthread> others;
      for (std::size_t i = 1; i < threads; ++i) others.emplace_back(work);
      work();
    }
    if (!queue.failure()) return;
    const auto& [piece, error] = *queue.failure();
    throw StorageError{read_place(reader, piece.block, piece.range),
                       "cannot read " + std::to_string(piece.range.byte_count) + " bytes", error};
  }
  [[nodiscard]] std::vector<detail::PieceQueue::Piece> pieces() const {
    std::vector<detail::PieceQueue::Piece> pieces;
    for (std::size_t b = 0; b < images_.size(); ++b) {
      for (std::uint64_t at = 0; at < images_[b].byte_count; at += piece_byte_count) {
        const std::uint64_t count = std::min(piece_byte_count, images_[b].byte_count - at);
        pieces.push_back({block_at(b), {at, count}});
      }
    }
    return pieces;
  }

  std::vector<BlockImage> images_;
  std::vector<std::uint64_t> begins_;  ///< of each block, in the region
  HugePages pages_;
  std::vector<std::span<std::byte>> regions_;  ///< the one region; none if there are no bytes
  std::optional<BlockMap> map_;                ///< where the bytes came from
};
static_assert(addressable_tier<RamStorage> && locating_tier<RamStorage>);

}  // namespace block_streamer::inline v1
