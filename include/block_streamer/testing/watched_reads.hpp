// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/storage/storage_tier.hpp>
#include <block_streamer/testing/conformance.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1::testing {

/// What each block's image should hold, by block.
using Images = std::vector<std::vector<std::byte>>;

/// Page-aligned memory between two guards; all of it poison to begin with.
class GuardedBuffer {
 public:
  static constexpr std::byte poison{0xAB};
  static constexpr std::size_t page = 4096;

  explicit GuardedBuffer(std::size_t byte_count)
      : byte_count_{byte_count},
        memory_{static_cast<std::byte*>(
            ::operator new (byte_count + 2 * page, std::align_val_t{page}))} {
    std::fill_n(memory_.get(), byte_count + 2 * page, poison);
  }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept {
    return {memory_.get() + page, byte_count_};
  }
  [[nodiscard]] bool guards_intact() const noexcept {
    const auto clean = [](std::span<const std::byte> guard) {
      return guard.front() == poison &&
             std::memcmp(guard.data(), guard.data() + 1, guard.size() - 1) == 0;
    };
    return clean({memory_.get(), page}) && clean({memory_.get() + page + byte_count_, page});
  }

 private:
  struct Free {
    void operator()(std::byte* p) const noexcept { ::operator delete (p, std::align_val_t{page}); }
  };
  std::size_t byte_count_;
  std::unique_ptr<std::byte, Free> memory_;
};

/// @brief Reads under way, and how each ended. What they write to lives until the last of them has
/// ended, also if the suite gave up waiting.
/// **Threads.** Completions from any; everything else from one.
class WatchedReads {
 public:
  struct Read {
    BlockId block{};
    ByteRange range;
    GuardedBuffer buffer;
    std::error_code error;
    std::size_t byte_count = 0;
    int calls = 0;
  };

  template <class Tier>
  void start(Tier& tier, BlockId block, ByteRange range) {
    Read& read = state_->reads.emplace_back(
        Read{block, range, GuardedBuffer{static_cast<std::size_t>(range.byte_count)}, {}, 0, 0});
    tier.async_read(block, range, read.buffer.bytes(),
                    [state = state_, &read](std::error_code error, std::size_t n) {
                      const std::scoped_lock lock{state->mutex};
                      read.error = error;
                      read.byte_count = n;
                      state->ended += ++read.calls == 1 ? 1 : 0;
                      state->changed.notify_all();
                    });
  }
  /// @brief True once every read has ended. @param progress  makes virtual time pass; false if
  /// nothing can happen any more. Empty: other threads are at work. @param patience  how long to
  /// wait for them.
  [[nodiscard]] bool wait(const std::function<bool()>& progress, std::chrono::seconds patience) {
    const auto done = [this] { return state_->ended == state_->reads.size(); };
    std::unique_lock lock{state_->mutex};
    if (!progress) return state_->changed.wait_for(lock, patience, done);
    while (!done()) {
      lock.unlock();
      const bool goes_on = progress();
      lock.lock();
      if (!goes_on) return done();
    }
    return true;
  }
  [[nodiscard]] std::size_t ended() const {
    const std::scoped_lock lock{state_->mutex};
    return state_->ended;
  }
  /// @pre wait() was true.
  [[nodiscard]] const std::deque<Read>& reads() const noexcept { return state_->reads; }

 private:
  struct State {
    std::mutex mutex;  // guards how the reads ended
    std::condition_variable changed;
    std::deque<Read> reads;  ///< grows only, so that references hold
    std::size_t ended = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace block_streamer::inline v1::testing
