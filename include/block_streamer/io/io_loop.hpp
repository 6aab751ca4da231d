// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/io/asio_threads.hpp>
#include <block_streamer/io/progress_loop.hpp>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace block_streamer::inline v1 {

/// @brief A progress_loop on one thread of its own, and an Asio executor for whoever needs one.
/// **Threads.** `post` and `executor` from any; `wait_until` from any but the loop's own.
/// **Lifetime.** The destructor runs what was posted, waits for work outstanding on the executor,
/// and joins. Nothing may be posted from outside the loop once it has begun.
/// **Errors.** A handler that throws ends the program: tasks are noexcept, handlers given to the
/// executor have to be.
class IoLoop {
 public:
  using executor_type = boost::asio::io_context::executor_type;

  IoLoop() : work_{context_.get_executor()}, thread_{[this]() noexcept { run(); }} {}
  IoLoop(const IoLoop&) = delete;
  IoLoop& operator=(const IoLoop&) = delete;
  ~IoLoop() {
    work_.reset();
    thread_.join();
  }

  /// @brief Queues `task(context)`. Tasks run one at a time, in the order of their posts.
  void post(void (*task)(void*) noexcept, void* context) {
    boost::asio::post(context_, [task, context]() noexcept { task(context); });
  }

  /// @brief Blocks until `done(context)`, which is asked at once and after every task that ran.
  /// @throws ContractViolation if called on the loop's thread, which would wait for itself.
  void wait_until(bool (*done)(void*), void* context) {
    expects(std::this_thread::get_id() != thread_.get_id(), "wait_until called on the loop itself");
    for (;;) {
      const std::uint64_t seen = tasks_run();
      if (done(context)) return;
      // Counted before `done` was asked, so a task that ends in between is not missed.
      std::unique_lock lock{mutex_};
      ran_.wait(lock, [&] { return tasks_run_ != seen; });
    }
  }

  [[nodiscard]] executor_type executor() noexcept { return context_.get_executor(); }

 private:
  void run() noexcept {
    while (context_.run_one() != 0) {
      {
        const std::scoped_lock lock{mutex_};
        ++tasks_run_;
      }
      ran_.notify_all();
    }
  }
  std::uint64_t tasks_run() {
    const std::scoped_lock lock{mutex_};
    return tasks_run_;
  }

  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<executor_type> work_;
  std::mutex mutex_;  // guards tasks_run_
  std::condition_variable ran_;
  std::uint64_t tasks_run_ = 0;
  std::thread thread_;  // last: it uses everything above
};
static_assert(progress_loop<IoLoop>);

}  // namespace block_streamer::inline v1
