// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/block_image.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/core/io_completion.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Where block images come from.
/// - `block_count()`, `image(block)`: const, O(1), thread-safe; the image's address is stable for
/// the tier's life.
/// - `async_read(block, range, out, done)`: fills all of `out` with image bytes [range), or fails;
/// short reads, EINTR and
///   EAGAIN are the tier's business. Many reads may be in flight over disjoint `out`; they complete
///   in any order, on any thread, also inline. Initiation never throws; a failure arrives as the
///   error_code.
///   @pre range within the image and aligned to read_granularity; out.size() == range.byte_count;
///   `out` valid until completion.
/// **Lifetime.** The tier outlives every operation it accepted: its destructor waits for them.
/// @pre for moving a tier: no operation in flight.
template <class T>
concept storage_tier = std::movable<T> &&
    requires(T& tier, const T& constant_tier, BlockId block, ByteRange range,
             std::span<std::byte> out, IoCompletion done) {
  { constant_tier.block_count() }
  noexcept->std::same_as<std::size_t>;
  { constant_tier.image(block) }
  noexcept->std::same_as<const BlockImage&>;
  { tier.async_read(block, range, out, std::move(done)) }
  noexcept->std::same_as<void>;
};

/// @brief A tier whose images are in host memory already, so nothing is staged.
/// Addresses are stable for the tier's life. `regions()` is what the pipeline page-locks; where
/// that is refused the tier is staged like any other. The tier itself never knows a device.
template <class T>
concept addressable_tier = storage_tier<T> && requires(const T& tier, BlockId block) {
  { tier.bytes(block) }
  noexcept->std::same_as<std::span<const std::byte>>;
  { tier.regions() }
  noexcept->std::same_as<std::span<const std::span<std::byte>>>;
};

/// @brief An addressable tier of which only some blocks are in memory: `bytes(block)` is empty for
/// the others, which are read. `in_memory(block)` does not change.
template <class T>
concept partly_addressable_tier = addressable_tier<T> && requires(const T& tier, BlockId block) {
  { tier.in_memory(block) }
  noexcept->std::same_as<bool>;
};

/// @brief A tier that can say where an image byte comes from: "file, offset, tensor", for messages.
template <class T>
concept locating_tier = storage_tier<T> &&
    requires(const T& tier, BlockId block, std::uint64_t image_offset) {
  { tier.locate(block, image_offset) } -> std::same_as<std::string>;
};

/// @brief A tier that reads with less effort into memory that it was told of: it may pin it once.
/// - `prepare(memory)`: reads will go there, until `forget` of the same memory. Alive and in place
/// so long. A hint: whatever comes of it, reads elsewhere work, and reads there as well.
/// - `forget(memory)`: @pre no read into it is in flight.
/// **Threads.** Not inside a completion of the tier.
template <class T>
concept preparing_tier = storage_tier<T> && requires(T& tier, std::span<std::byte> memory) {
  { tier.prepare(memory) }
  noexcept->std::same_as<void>;
  { tier.forget(memory) }
  noexcept->std::same_as<void>;
};

/// @brief The easy way to write a tier: a plain synchronous read, run on a thread pool by
/// Pooled<Reader>. `read` is thread-safe for disjoint `out`; same postcondition as async_read; an
/// error is returned, an exception is mapped to one.
template <class R>
concept block_reader = std::movable<R> &&
    requires(R& reader, const R& constant_reader, BlockId block, ByteRange range,
             std::span<std::byte> out) {
  { constant_reader.block_count() }
  noexcept->std::same_as<std::size_t>;
  { constant_reader.image(block) }
  noexcept->std::same_as<const BlockImage&>;
  { reader.read(block, range, out) } -> std::same_as<std::error_code>;
};

}  // namespace block_streamer::inline v1
