// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace block_streamer::inline v1 {

/// @brief Counts somebody's operations in flight, so that their owner can outlast them where what
/// performs them is shared. **Threads.** Any.
/// **Lifetime.** The destructor waits until every operation has left.
class ReadGroup {
 public:
  ReadGroup() = default;
  ReadGroup(const ReadGroup&) = delete;
  ReadGroup& operator=(const ReadGroup&) = delete;
  ~ReadGroup() { wait(); }

  /// @brief Blocks until none is in flight.
  void wait() {
    std::unique_lock lock{mutex_};
    empty_.wait(lock, [this] { return count_ == 0; });
  }

  void enter() {
    const std::scoped_lock lock{mutex_};
    ++count_;
  }
  /// @brief The caller's last touch of this object and of what it protects.
  void leave() {
    const std::scoped_lock lock{mutex_};  // held while notifying: the waiter may destroy us
    if (--count_ == 0) empty_.notify_all();
  }

 private:
  std::mutex mutex_;  // guards count_
  std::condition_variable empty_;
  std::size_t count_ = 0;
};

}  // namespace block_streamer::inline v1
