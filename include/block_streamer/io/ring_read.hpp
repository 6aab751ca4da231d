// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <system_error>

namespace block_streamer::inline v1 {

/// One request to a ring.
struct RingRead {
  int descriptor = -1;
  std::uint64_t offset = 0;
  std::span<std::byte> out;
  std::optional<std::uint32_t> buffer;  ///< the announced memory that holds `out`
  bool may_block = false;               ///< hand it to a thread of the system's at once
  std::uint64_t tag = 0;                ///< comes back with the answer
};

/// @brief A queue of reads in the system, and the seam at which tests script its answers.
/// **Threads.** All of it one thread's, the one that opened it; `wake` any thread's.
/// - `push(read)`: queues it; false if the queue is full until the next submission.
/// - `submit_and_wait()`: hands over what is queued and waits for an answer or a wake. Returns 0,
/// or a negative error number; then some of the queued may not have been taken.
/// - `take_back(take)`: calls take(tag) for each request that the system has not taken and
/// withdraws it.
/// - `pause()`: waits a little, or for an answer; for when submit_and_wait fails.
/// - `reap(take)`: calls take(tag, result) for each answer, result as a system call's: bytes, or a
/// negative error number. Answers come in any order. `take` may push.
/// - `wake()`: ends the wait under way, or the next one.
/// - `add_buffer(index, memory)`, `remove_buffer(index)`: pins memory for RingRead::buffer, from 0
/// on.
template <class R>
concept read_ring = requires(R& ring, const RingRead& read,
                             void (*take)(std::uint64_t, std::int32_t),
                             void (*take_back)(std::uint64_t), std::uint32_t index,
                             std::span<std::byte> memory) {
  { ring.push(read) } -> std::same_as<bool>;
  { ring.submit_and_wait() } -> std::same_as<int>;
  { ring.take_back(take_back) } -> std::same_as<void>;
  { ring.pause() } -> std::same_as<void>;
  { ring.reap(take) } -> std::same_as<void>;
  { ring.wake() } -> std::same_as<void>;
  { ring.add_buffer(index, memory) } -> std::same_as<std::error_code>;
  { ring.remove_buffer(index) } -> std::same_as<void>;
};

}  // namespace block_streamer::inline v1
