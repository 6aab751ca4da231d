// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/image_sums.hpp>
#include <block_streamer/checkpoint/shard_manifest_writer.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/checksum_errc.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/storage_tier.hpp>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// Memory for the rest of a chunk, aligned for any tier.
class EdgeBuffer {
 public:
  explicit EdgeBuffer(std::size_t byte_count)
      : bytes_{static_cast<std::byte*>(
            ::operator new (byte_count, std::align_val_t{packed_alignment}))},
        byte_count_{byte_count} {}
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {bytes_.get(), byte_count_}; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const noexcept {
      ::operator delete (bytes, std::align_val_t{packed_alignment});
    }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  std::size_t byte_count_;
};

}  // namespace detail

/// @brief A tier whose every read is compared with checksums before it is reported. A read is good
/// only if all chunks that it touches are: where it ends inside one, the rest of that chunk is read
/// as well, and counts for nothing else.
/// **Errors.** ChecksumErrc::mismatch; locate() then names the chunk and both sums.
/// **Threads.** As the inner tier; sums are taken on the thread that its completion comes on.
/// **Cost.** A CRC-32C of the bytes, and an allocation a read. Reads at multiples of 64 KiB from
/// the beginning of a block need nothing else; others read up to 128 KiB more.
/// **Lifetime.** The destructor waits for accepted reads; it must not run inside a completion.
template <storage_tier Inner>
class VerifiedStorage {
 public:
  /// @param sums  of every block of the tier, see make_image_sums().
  VerifiedStorage(Inner inner, std::vector<ImageSums> sums)
      : state_{std::make_unique<State>(std::move(inner), std::move(sums))} {
    expects(state_->sums.size() == state_->inner.block_count(),
            "a verified tier has sums of each of its blocks");
  }

  [[nodiscard]] std::size_t block_count() const noexcept { return state_->inner.block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return state_->inner.image(block);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    const std::error_code refused = check_read(state_->inner, block, range, out);
    if (refused || range.byte_count == 0) return done(refused, 0);
    // Nothing is moved into a read that there is no memory for.
    std::unique_ptr<Read> read{new (std::nothrow) Read{
        state_.get(), block, range, out, {}, 0, std::move(done), std::nullopt}};
    if (!read) return done(std::make_error_code(std::errc::not_enough_memory), 0);
    state_->begin(std::move(read));
  }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return state_->locate(block, image_offset);
  }
  /// @brief For an inner tier that wants to know the memory of reads beforehand.
  void prepare(std::span<std::byte> memory) noexcept requires requires(Inner& tier) {
    tier.prepare(memory);
  }
  { state_->inner.prepare(memory); }
  void forget(std::span<std::byte> memory) noexcept requires requires(Inner& tier) {
    tier.forget(memory);
  }
  { state_->inner.forget(memory); }

 private:
  struct State;
  struct Read {
    State* state;
    BlockId block;
    ByteRange range;
    std::span<std::byte> out;
    std::array<std::size_t, 2> edges{};  ///< chunks that reach beyond the range
    std::size_t edge_count = 0;
    IoCompletion done;
    std::optional<detail::EdgeBuffer> edge;
  };
  struct Mismatch {
    BlockId block;
    std::uint64_t image_offset;  ///< where the read began
    std::size_t chunk;
    std::uint32_t found;

    [[nodiscard]] bool is_of(BlockId other, std::uint64_t offset) const noexcept {
      return block == other && image_offset == offset;
    }
  };
  /// Several reads that are in flight together can fail before the first is asked about.
  static constexpr std::size_t most_mismatches = 64;

  struct State {
    State(Inner held, std::vector<ImageSums> held_sums)
        : sums{std::move(held_sums)}, inner{std::move(held)} {
      mismatches.reserve(most_mismatches);
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() {
      std::unique_lock lock{mutex};
      ended.wait(lock, [this] { return in_flight == 0; });
    }

    void begin(std::unique_ptr<Read> read) noexcept {
      {
        const std::scoped_lock lock{mutex};
        ++in_flight;
        forget_mismatch(read->block, read->range.offset);
      }
      const BlockId block = read->block;
      const ByteRange range = read->range;
      const std::span<std::byte> out = read->out;
      inner.async_read(block, range, out,
                       [read = std::move(read)](std::error_code error, std::size_t) mutable {
                         State* const state = read->state;
                         state->check_inside(std::move(read), error);
                       });
    }

    /// The chunks that the read has whole; then those that it has in part.
    void check_inside(std::unique_ptr<Read> read, std::error_code error) noexcept {
      if (error) return end(std::move(read), error);
      const ImageSums& of_block = sums[index_of(read->block)];
      const ChunkRange chunks = of_block.chunks_in(read->range);
      for (std::size_t chunk = chunks.first; chunk < chunks.end; ++chunk) {
        const ByteRange cover = of_block.cover(chunk);
        if (cover.offset < read->range.offset || cover.end() > read->range.end()) {
          read->edges[read->edge_count++] = chunk;  // chunks ascend: only the first and the last
        } else if (!matches(*read, chunk, read->range.offset, read->out)) {
          return end(std::move(read), ChecksumErrc::mismatch);
        }
      }
      check_edge(std::move(read));
    }

    /// Reads the last edge chunk that is left as a whole, and puts in what the caller got of it.
    void check_edge(std::unique_ptr<Read> read) noexcept {
      if (read->edge_count == 0) return end(std::move(read), {});
      const std::size_t chunk = read->edges[--read->edge_count];
      const BlockId block = read->block;
      const ByteRange whole = rounded(block, sums[index_of(block)].cover(chunk));
      std::span<std::byte> buffer;
      try {
        read->edge.emplace(static_cast<std::size_t>(whole.byte_count));
        buffer = read->edge->span();
      } catch (const std::bad_alloc&) {
        return end(std::move(read), std::make_error_code(std::errc::not_enough_memory));
      }
      inner.async_read(
          block, whole, buffer,
          [read = std::move(read), whole, chunk](std::error_code error, std::size_t) mutable {
            State* const state = read->state;
            if (error) return state->end(std::move(read), error);
            put_in(*read, whole);
            if (!state->matches(*read, chunk, whole.offset, read->edge->span())) {
              return state->end(std::move(read), ChecksumErrc::mismatch);
            }
            state->check_edge(std::move(read));
          });
    }
    static void put_in(const Read& read, ByteRange whole) noexcept {
      const std::uint64_t begin = std::max(whole.offset, read.range.offset);
      const std::uint64_t last = std::min(whole.end(), read.range.end());
      std::memcpy(read.edge->span().data() + (begin - whole.offset),
                  read.out.data() + (begin - read.range.offset),
                  static_cast<std::size_t>(last - begin));
    }
    [[nodiscard]] ByteRange rounded(BlockId block, ByteRange range) const noexcept {
      const BlockImage& image = inner.image(block);
      const std::uint64_t begin = round_down(range.offset, image.read_granularity);
      const std::uint64_t last =
          std::min(round_up(range.end(), image.read_granularity), image.byte_count);
      return {begin, last - begin};
    }
    [[nodiscard]] bool matches(const Read& read, std::size_t chunk, std::uint64_t begin,
                               std::span<const std::byte> bytes) noexcept {
      const ImageSums& of_block = sums[index_of(read.block)];
      const std::uint32_t found = of_block.sum(chunk, begin, bytes);
      if (found == of_block.expected(chunk)) return true;
      const std::scoped_lock lock{mutex};
      forget_mismatch(read.block, read.range.offset);
      if (mismatches.size() == most_mismatches) mismatches.erase(mismatches.begin());
      mismatches.push_back({read.block, read.range.offset, chunk, found});
      return false;
    }
    /// @pre the lock is held.
    void forget_mismatch(BlockId block, std::uint64_t image_offset) noexcept {
      std::erase_if(mismatches,
                    [&](const Mismatch& known) { return known.is_of(block, image_offset); });
    }
    void end(std::unique_ptr<Read> read, std::error_code error) noexcept {
      IoCompletion done = std::move(read->done);
      const std::size_t byte_count = error ? 0 : read->out.size();
      read.reset();
      done(error, byte_count);
      const std::scoped_lock lock{mutex};  // held while notifying: then the destructor may go on
      --in_flight;
      ended.notify_all();
    }

    [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
      std::optional<Mismatch> wrong;
      {
        const std::scoped_lock lock{mutex};
        for (const Mismatch& known : mismatches) {
          if (known.is_of(block, image_offset)) wrong = known;
        }
      }
      if (!wrong) return inner_place(block, image_offset);
      const ImageSums& of_block = sums[index_of(block)];
      return inner_place(block, of_block.cover(wrong->chunk).offset) + ", chunk at " +
             std::to_string(of_block.offset(wrong->chunk)) + ": checksum " +
             detail::crc_text(of_block.expected(wrong->chunk)) + " expected, " +
             detail::crc_text(wrong->found) + " found";
    }
    [[nodiscard]] std::string inner_place(BlockId block, std::uint64_t image_offset) const {
      if constexpr (locating_tier<Inner>) {
        return inner.locate(block, image_offset);
      } else {
        return "image offset " + std::to_string(image_offset);
      }
    }

    std::vector<ImageSums> sums;
    mutable std::mutex mutex;  // guards the three below
    std::condition_variable ended;
    std::size_t in_flight = 0;
    std::vector<Mismatch> mismatches;  ///< the latest of each read, the newest last
    Inner inner;
  };

  std::unique_ptr<State> state_;
};
static_assert(locating_tier<VerifiedStorage<AnyStorage>> &&
              !addressable_tier<VerifiedStorage<AnyStorage>>);

}  // namespace block_streamer::inline v1
