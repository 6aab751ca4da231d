// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/io/iocp_runtime.hpp>
#include <block_streamer/io/read_group.hpp>
#include <block_streamer/storage/direct_extents.hpp>
#include <block_streamer/storage/extent_reader.hpp>
#include <block_streamer/storage/joined_reads.hpp>
#include <block_streamer/storage/positional_file.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/storage_tier.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

struct IocpStorageOptions {
  /// Where the file system refuses unbuffered reads, its cache is used; describe() says so.
  FileAccess access = FileAccess::direct;
};

/// @brief A checkpoint's files on Windows, read where they lie by a completion port, past the
/// system's cache. Any safetensors file will do; blocks may begin and end at any byte and lie in
/// several files. Where the file system refuses unbuffered reads, they go through its cache;
/// describe() says what is in use and why.
/// **Errors.** A file that shrank: FileErrc::shrank, never old or foreign bytes; else the system's.
/// **Threads.** Reads from any, at once; completions run on the runtime's thread.
/// **Cancellation.** cancel(), for all reads together.
/// **Lifetime.** The runtime outlives it. The destructor waits for every accepted read; it must not
/// run inside a completion of this tier.
/// **Cost.** Images are rounded outwards to the volume's sectors at each end of a range; nothing is
/// copied on the host.
template <class Runtime>
class BasicIocpStorage {
 public:
  using Options = IocpStorageOptions;

  /// @throws StorageError if a file cannot be opened, or ends before bytes that a block needs.
  BasicIocpStorage(Runtime& runtime, BlockMap map, Options options = {})
      : state_{std::make_unique<State>(nullptr, runtime, std::move(map), options)} {}
  /// @brief With a runtime of its own.
  explicit BasicIocpStorage(BlockMap map, Options options = {})
      : BasicIocpStorage{std::make_unique<Runtime>(), std::move(map), options} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return state_->reader.block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return state_->reader.image(block);
  }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return state_->reader.locate(block, image_offset);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    const std::error_code error = check_read(*this, block, range, out);
    if (error || out.empty()) return done(error, 0);
    const Pieces pieces{*state_, block, range};
    JoinedReads* const joined = JoinedReads::make(pieces.count(), out.size(), done);
    if (joined == nullptr) return;
    pieces.for_each([&](const Extent& extent, ByteRange piece) {
      start(extent, piece,
            out.subspan(static_cast<std::size_t>(piece.offset - range.offset),
                        static_cast<std::size_t>(piece.byte_count)),
            joined->part());
    });
  }

  /// @brief Ends the reads accepted so far: each still completes, with operation_canceled unless
  /// its bytes came first. Does not wait for them.
  void cancel() noexcept {
    for (const PositionalFile& file : state_->reader.sources()) {
      state_->runtime.cancel(file.native_handle());
    }
  }

  /// @brief What is in use and why, in one line: "I/O completion port, FILE_FLAG_NO_BUFFERING,
  /// 512-byte blocks", or "I/O completion port, page cache (FILE: why)".
  [[nodiscard]] std::string describe() const {
    return "I/O completion port, " + describe_access(state_->reader);
  }
  [[nodiscard]] const BlockMap& block_map() const noexcept { return state_->reader.block_map(); }

 private:
  using Reader = ExtentReader<PositionalFile>;

  struct State {
    State(std::unique_ptr<Runtime> own, Runtime& used, BlockMap map, const Options& options)
        : owned{std::move(own)},
          runtime{used},
          reader{open_extents(std::move(map), options.access)} {
      for (std::size_t f = 0; f < reader.sources().size(); ++f) {
        if (const auto error = runtime.attach(reader.sources()[f].native_handle())) {
          throw StorageError{reader.block_map().files()[f].string(),
                             "cannot be attached to the I/O completion port", error};
        }
      }
    }
    std::unique_ptr<Runtime> owned;
    Runtime& runtime;
    Reader reader;
    ReadGroup in_flight;  // destroyed first: it waits
  };

  /// A read cut at the ends of extents, and into requests.
  class Pieces {
   public:
    /// @pre range not empty, within the image.
    Pieces(const State& state, BlockId block, ByteRange range) noexcept
        : range_{range}, largest_{state.runtime.options().request_byte_count} {
      const auto& extents = state.reader.block_map().blocks()[index_of(block)].extents;
      const Extent* const first = extent_at(extents, range.offset);
      const Extent* const last = extent_at(extents, range.end() - 1);
      extents_ = {first, static_cast<std::size_t>(last - first) + 1};
    }
    template <class Function>
    void for_each(Function function) const {
      for (const Extent& extent : extents_) {
        const std::uint64_t end = std::min(range_.end(), extent.image_offset + extent.byte_count);
        for (std::uint64_t at = std::max(range_.offset, extent.image_offset); at < end;) {
          const std::uint64_t count = std::min(largest_, end - at);
          function(extent, ByteRange{at, count});
          at += count;
        }
      }
    }
    [[nodiscard]] std::size_t count() const noexcept {
      std::size_t count = 0;
      for_each([&count](const Extent&, ByteRange) { ++count; });
      return count;
    }

   private:
    ByteRange range_;
    std::uint64_t largest_;
    std::span<const Extent> extents_;
  };

  BasicIocpStorage(std::unique_ptr<Runtime> owned, BlockMap map, const Options& options) {
    Runtime& runtime = *owned;
    state_ = std::make_unique<State>(std::move(owned), runtime, std::move(map), options);
  }

  /// @param piece  of the image, within one extent.
  void start(const Extent& extent, ByteRange piece, std::span<std::byte> out,
             IoCompletion done) noexcept {
    const PositionalFile& file = state_->reader.sources()[extent.file];
    IocpRead read;
    read.file = file.native_handle();
    read.offset = extent.file_offset + (piece.offset - extent.image_offset);
    read.out = out;
    read.needed =
        std::min<std::uint64_t>(out.size(), file.size() - std::min(file.size(), read.offset));
    read.alignment = file.alignment();
    state_->runtime.async_read(read, std::move(done), &state_->in_flight);
  }

  std::unique_ptr<State> state_;
};

/// @see BasicIocpStorage
using IocpStorage = BasicIocpStorage<IocpRuntime>;
static_assert(locating_tier<IocpStorage> && !addressable_tier<IocpStorage>);

}  // namespace block_streamer::inline v1
