// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/io/read_group.hpp>
#include <block_streamer/io/uring_runtime.hpp>
#include <block_streamer/storage/direct_extents.hpp>
#include <block_streamer/storage/joined_reads.hpp>
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/positional_file.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/read_threads.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

struct UringStorageOptions {
  /// Where the file system refuses direct reads, the page cache is read; describe() says so.
  FileAccess access = FileAccess::direct;
  /// Reads under way at once where there is no ring.
  std::size_t fallback_threads = default_read_threads();
};

/// @brief A checkpoint's files, read where they lie by an io_uring, past the page cache. The tier
/// for models larger than memory: the drive's own rate for little time of the processor. Any
/// safetensors file will do; blocks may begin and end at any byte and lie in several files. Where
/// the system refuses a ring, the same reads run on a thread pool; where the file system refuses
/// direct reads, they go through the page cache. describe() says what is in use and why.
/// **Errors.** A file that shrank: FileErrc::shrank, never old or foreign bytes; else the system's.
/// **Threads.** Reads from any, at once; completions run on the runtime's thread.
/// **Lifetime.** The runtime outlives it. The destructor waits for every accepted read; it must not
/// run inside a completion of this tier.
/// **Cost.** Images are rounded outwards to the file system's blocks, 512 bytes or 4 KiB at each
/// end of a range; nothing is copied on the host.
template <class Runtime>
class BasicUringStorage {
 public:
  using Options = UringStorageOptions;
  /// @brief A good PipelineOptions::chunk_byte_count where reads go past the page cache: a drive is
  /// kept at work by few large reads, and a chunk's cost to the processor comes half as often as
  /// with the default, which is for sources as fast as the link.
  static constexpr std::uint64_t chunk_byte_count = std::uint64_t{8} << 20;

  /// @throws StorageError if a file cannot be opened, or ends before bytes that a block needs.
  BasicUringStorage(Runtime& runtime, BlockMap map, Options options = {})
      : state_{std::make_unique<State>(nullptr, runtime, std::move(map), options)} {}
  /// @brief With a runtime of its own.
  explicit BasicUringStorage(BlockMap map, Options options = {})
      : BasicUringStorage{std::make_unique<Runtime>(), std::move(map), options} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return reader().block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return reader().image(block);
  }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return reader().locate(block, image_offset);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    if (state_->pool) return state_->pool->async_read(block, range, out, std::move(done));
    const std::error_code error = check_read(*this, block, range, out);
    if (error || out.empty()) return done(error, 0);
    const auto pieces = extents_of(block, range);
    if (pieces.size() == 1) return start(pieces.front(), range, out, std::move(done));
    JoinedReads* const joined = JoinedReads::make(pieces.size(), out.size(), done);
    if (joined == nullptr) return;
    for (const Extent& extent : pieces) start(extent, range, out, joined->part());
  }

  /// @brief Announces memory that reads will go to, so that it is pinned once.
  void prepare(std::span<std::byte> memory) noexcept {
    if (!state_->pool) state_->runtime.pin(memory);
  }
  void forget(std::span<std::byte> memory) noexcept {
    if (!state_->pool) state_->runtime.unpin(memory);
  }

  /// @brief True if reads go through the ring.
  [[nodiscard]] bool uses_ring() const noexcept { return !state_->pool; }
  /// @brief What is in use and why, in one line: "io_uring (single_issuer, defer_taskrun),
  /// O_DIRECT, 512-byte blocks", or "thread pool, page cache (…): io_uring is refused: …".
  [[nodiscard]] std::string describe() const {
    const UringReport report = state_->runtime.report();
    const std::string access = describe_access(reader());
    if (state_->pool) return "thread pool, " + access + ": " + report.refusal;
    const std::string plain = report.fixed_buffers_refusal;
    return "io_uring (" + report.setup + "), " + access +
           (report.fixed_byte_count != 0 ? ", pinned buffers" : "") +
           (plain.empty() ? "" : ", plain buffers: " + plain);
  }
  [[nodiscard]] const BlockMap& block_map() const noexcept { return reader().block_map(); }

 private:
  using Reader = ExtentReader<PositionalFile>;

  struct State {
    State(std::unique_ptr<Runtime> own, Runtime& used, BlockMap map, const Options& options)
        : owned{std::move(own)}, runtime{used} {
      Reader opened = open_extents(std::move(map), options.access);
      if (runtime.running()) {
        reader.emplace(std::move(opened));
      } else {
        pool.emplace(std::move(opened), options.fallback_threads);
      }
    }
    std::unique_ptr<Runtime> owned;
    Runtime& runtime;
    std::optional<Reader> reader;        ///< or
    std::optional<Pooled<Reader>> pool;  ///< where there is no ring
    ReadGroup in_flight;                 // destroyed first: it waits
  };

  BasicUringStorage(std::unique_ptr<Runtime> owned, BlockMap map, const Options& options) {
    Runtime& runtime = *owned;
    state_ = std::make_unique<State>(std::move(owned), runtime, std::move(map), options);
  }

  [[nodiscard]] const Reader& reader() const noexcept {
    return state_->pool ? state_->pool->reader() : *state_->reader;
  }
  /// Those that hold bytes of [range). @pre not empty, within the image.
  [[nodiscard]] std::span<const Extent> extents_of(BlockId block, ByteRange range) const noexcept {
    const std::vector<Extent>& extents = block_map().blocks()[index_of(block)].extents;
    const Extent* const first = extent_at(extents, range.offset);
    const Extent* const last = extent_at(extents, range.end() - 1);
    return {first, static_cast<std::size_t>(last - first) + 1};
  }
  /// The part of a read that lies in one extent.
  void start(const Extent& extent, ByteRange range, std::span<std::byte> out,
             IoCompletion done) noexcept {
    const std::uint64_t begin = std::max(range.offset, extent.image_offset);
    const std::uint64_t end = std::min(range.end(), extent.image_offset + extent.byte_count);
    const PositionalFile& file = state_->reader->sources()[extent.file];
    FileRead read;
    read.descriptor = file.native_handle();
    read.offset = extent.file_offset + (begin - extent.image_offset);
    read.out = out.subspan(static_cast<std::size_t>(begin - range.offset),
                           static_cast<std::size_t>(end - begin));
    const std::uint64_t there = file.size() - std::min(file.size(), read.offset);
    read.needed = std::min<std::uint64_t>(read.out.size(), there);
    read.alignment = file.alignment();
    state_->runtime.async_read(read, std::move(done), &state_->in_flight);
  }

  std::unique_ptr<State> state_;
};

/// @see BasicUringStorage
using UringStorage = BasicUringStorage<UringRuntime>;
static_assert(preparing_tier<UringStorage> && locating_tier<UringStorage> &&
              !addressable_tier<UringStorage>);

}  // namespace block_streamer::inline v1
