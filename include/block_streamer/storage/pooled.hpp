// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/io/worker_threads.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/read_threads.hpp>
#include <block_streamer/storage/storage_tier.hpp>

#include <boost/system/system_error.hpp>

#include <concepts>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// A block_reader that can say where an image byte comes from.
template <class R>
concept locating_reader = block_reader<R> &&
    requires(const R& reader, BlockId block, std::uint64_t image_offset) {
  { reader.locate(block, image_offset) } -> std::same_as<std::string>;
};

namespace detail {

/// @brief The code of the exception being handled; io_error for one that carries none.
/// @pre called inside a catch block.
inline std::error_code current_exception_code() noexcept {
  const std::error_code unknown = std::make_error_code(std::errc::io_error);
  try {
    throw;
  } catch (const StorageError& error) {
    return error.code() ? error.code() : unknown;
  } catch (const std::system_error& error) {
    return error.code() ? error.code() : unknown;
  } catch (const boost::system::system_error& error) {
    return error.code() ? std::error_code{error.code()} : unknown;
  } catch (const std::bad_alloc&) {
    return std::make_error_code(std::errc::not_enough_memory);
  } catch (...) {
    return unknown;
  }
}

template <block_reader Reader>
std::error_code read_or_map(Reader& reader, BlockId block, ByteRange range,
                            std::span<std::byte> out) noexcept {
  try {
    if (const std::error_code error = check_read(reader, block, range, out)) return error;
    return range.byte_count == 0 ? std::error_code{} : reader.read(block, range, out);
  } catch (...) {
    return current_exception_code();
  }
}

}  // namespace detail

/// @brief Makes a storage tier of a synchronous reader: each read runs on a thread of its own pool.
/// **Threads.** As storage_tier; completions run on the pool's threads. **Errors.** What the reader
/// returns; an exception becomes the code it carries, not_enough_memory or io_error; a read outside
/// the image is invalid_argument. A read of no bytes never reaches the reader.
/// **Cost.** One queue entry a read. Order of completion: none promised.
/// **Lifetime.** The destructor waits for every accepted read; it must not run inside a completion
/// of this tier.
template <block_reader Reader>
class Pooled {
 public:
  /// @param threads reads under way at once, at least 1.
  /// @throws StorageError if the system refuses one of them.
  explicit Pooled(Reader reader, std::size_t threads = default_read_threads())
      : state_{std::make_unique<State>(std::move(reader), threads)} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return state_->reader.block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return state_->reader.image(block);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    state_->threads.post(
        [reader = &state_->reader, block, range, out, done = std::move(done)]() mutable noexcept {
          const std::error_code error = detail::read_or_map(*reader, block, range, out);
          done(error, error ? 0 : out.size());
        });
  }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const requires
      locating_reader<Reader> {
    return state_->reader.locate(block, image_offset);
  }
  [[nodiscard]] const Reader& reader() const noexcept { return state_->reader; }

 private:
  struct State {
    State(Reader held, std::size_t count) : reader{std::move(held)}, threads{count} {}

    Reader reader;
    WorkerThreads threads;  // last: what it runs uses the reader
  };
  std::unique_ptr<State> state_;
};

}  // namespace block_streamer::inline v1
