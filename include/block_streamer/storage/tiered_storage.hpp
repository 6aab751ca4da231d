// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/os/huge_pages.hpp>
#include <block_streamer/plan/spread.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/fill_images.hpp>
#include <block_streamer/storage/pooled.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Some blocks in host memory, the rest in another tier: for models that memory holds only
/// in part. What is in memory is decided once and read once, before the first pass.
/// The pipeline page-locks the blocks in memory, as far as the system lets it, and copies those
/// from where they are; all copies of a pass are still enqueued by one thread, in plan order (@see
/// FetchMachine). Blocks in memory that were not page-locked are read like any others.
/// **Threads.** As storage_tier. Reads of a block in memory complete on a thread of the tier's own,
/// never inside async_read: a copy would hold the I/O loop up.
/// **Cost.** One region a block, each the block's image in huge pages where the system grants them.
class TieredStorage {
 public:
  /// @brief As many blocks in memory as fit into `ram_budget` bytes, spread evenly over the list.
  /// @throws Error if the budget holds no block; StorageError naming file, offset and tensor if a
  /// read fails.
  [[nodiscard]] static TieredStorage within(AnyStorage below, std::uint64_t ram_budget,
                                            std::size_t threads = 2) {
    std::vector<std::uint64_t> sizes;
    for (std::size_t b = 0; b < below.block_count(); ++b)
      sizes.push_back(below.image(block_at(b)).byte_count);
    std::optional<std::uint64_t> least;  // a block without bytes is no use of a budget
    for (const std::uint64_t size : sizes) {
      if (size > 0) least = std::min(size, least.value_or(size));
    }
    if (least && *least > ram_budget) {
      throw Error{"a RAM budget of " + std::to_string(ram_budget) +
                  " bytes holds no block: the smallest has " + std::to_string(*least)};
    }
    return TieredStorage{std::move(below), spread_in_budget(sizes, ram_budget), threads};
  }

  /// @param in_memory  one flag per block. Where memory runs short, fewer are held: @see
  /// memory_block_count. @param threads  copies under way at once.
  /// @throws StorageError naming file, offset and tensor if a read fails.
  TieredStorage(AnyStorage below, const std::vector<std::uint8_t>& in_memory,
                std::size_t threads = 2)
      : state_{std::make_unique<State>(std::move(below))} {
    expects(in_memory.size() == block_count(), "there is one flag per block");
    take_memory(in_memory);
    std::vector<ImageToFill> images;
    for (std::size_t b = 0; b < block_count(); ++b) {
      if (!state_->pages[b].bytes().empty()) images.push_back({block_at(b), mutable_bytes(b)});
    }
    fill_images(state_->below, images);
    state_->copies.emplace(MemoryReader{state_.get()}, threads);
  }

  [[nodiscard]] std::size_t block_count() const noexcept { return state_->below.block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return state_->below.image(block);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    if (index_of(block) < block_count() && in_memory(block)) {
      return state_->copies->async_read(block, range, out, std::move(done));
    }
    state_->below.async_read(block, range, out, std::move(done));
  }
  void prepare(std::span<std::byte> memory) noexcept { state_->below.prepare(memory); }
  void forget(std::span<std::byte> memory) noexcept { state_->below.forget(memory); }
  [[nodiscard]] bool in_memory(BlockId block) const noexcept {
    return state_->in_memory[index_of(block)] != 0;
  }
  /// @brief The block's image; empty for one that is not in memory.
  [[nodiscard]] std::span<const std::byte> bytes(BlockId block) const noexcept {
    return mutable_bytes(index_of(block));
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept {
    return state_->regions;
  }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return state_->below.locate(block, image_offset);
  }
  [[nodiscard]] std::size_t memory_block_count() const noexcept {
    return static_cast<std::size_t>(
        std::count(state_->in_memory.begin(), state_->in_memory.end(), 1));
  }

 private:
  struct State;
  /// Reads what is in memory.
  struct MemoryReader {
    const State* state;
    [[nodiscard]] std::size_t block_count() const noexcept { return state->below.block_count(); }
    [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
      return state->below.image(block);
    }
    std::error_code read(BlockId block, ByteRange range, std::span<std::byte> out) const {
      const std::span<const std::byte> all = state->pages[index_of(block)].bytes();
      std::memcpy(out.data(), all.data() + range.offset, out.size());
      return {};
    }
  };
  struct State {
    explicit State(AnyStorage held) : below{std::move(held)} {}
    AnyStorage below;
    std::vector<HugePages> pages;  ///< per block
    std::vector<std::uint8_t> in_memory;
    std::vector<std::span<std::byte>> regions;
    std::optional<Pooled<MemoryReader>> copies;  ///< goes first: it reads the pages
  };

  void take_memory(const std::vector<std::uint8_t>& wanted) {
    bool is_short = false;
    for (std::size_t b = 0; b < wanted.size(); ++b) {
      state_->pages.emplace_back();
      if (wanted[b] != 0 && !is_short) is_short = !try_take(state_->pages.back(), block_at(b));
      state_->in_memory.push_back(wanted[b] != 0 && !is_short ? 1 : 0);
      const std::span<std::byte> region = mutable_bytes(b);
      if (!region.empty()) state_->regions.push_back(region);
    }
  }
  [[nodiscard]] bool try_take(HugePages& pages, BlockId block) const {
    try {
      pages = HugePages{static_cast<std::size_t>(image(block).byte_count)};
      return true;
    } catch (const StorageError&) {  // the rest streams
      return false;
    }
  }
  [[nodiscard]] std::span<std::byte> mutable_bytes(std::size_t block) const noexcept {
    return state_->pages[block].bytes();
  }

  std::unique_ptr<State> state_;  // operations in flight point to it
};
static_assert(partly_addressable_tier<TieredStorage> && locating_tier<TieredStorage> &&
              preparing_tier<TieredStorage>);

}  // namespace block_streamer::inline v1
