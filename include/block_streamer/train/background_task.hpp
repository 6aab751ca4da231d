// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/worker_threads.hpp>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Work that another thread does, one piece at a time, waited for before it is looked at.
/// **Threads.** One starts and waits, another works.
/// **Lifetime.** Whoever destroys it has waited.
class BackgroundTask {
 public:
  /// @pre the last piece was waited for.
  template <class Work>
  void start(WorkerThreads& threads, Work work) {
    running_ = true;
    try {
      threads.post([this, work = std::move(work)]() mutable noexcept { finish(run(work)); });
    } catch (...) {
      running_ = false;
      throw;
    }
  }
  /// @returns what the last piece threw since it was asked for; null: nothing, or there was none.
  [[nodiscard]] std::exception_ptr wait() noexcept {
    std::unique_lock lock{mutex_};
    finished_.wait(lock, [this] { return !running_; });
    return std::exchange(error_, nullptr);
  }

 private:
  template <class Work>
  static std::exception_ptr run(Work& work) noexcept {
    try {
      work();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
  void finish(std::exception_ptr error) noexcept {
    const std::lock_guard lock{mutex_};
    error_ = std::move(error);
    running_ = false;
    finished_.notify_all();  // with the mutex held: who waits may destroy this
  }

  std::mutex mutex_;
  std::condition_variable finished_;
  bool running_ = false;
  std::exception_ptr error_;
};

}  // namespace block_streamer::inline v1
