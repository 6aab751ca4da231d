// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/io/asio_threads.hpp>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include <cstddef>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Threads that run what is posted to them. Unlike Asio's thread_pool, which joins forever
/// if the system refuses it one of its threads, this one fails then.
/// **Threads.** `post` from any. **Errors.** What is posted is noexcept.
/// **Lifetime.** The destructor runs what was posted, unless stopped, and joins; it must not run on
/// one of these threads.
class WorkerThreads {
 public:
  /// Starts a thread that runs its argument; throws std::system_error as std::thread does.
  using Start = std::function<std::thread(std::function<void()>)>;

  /// @param count  at least 1.
  /// @throws StorageError if the system refuses a thread: none of them runs then.
  explicit WorkerThreads(std::size_t count, const Start& start = start_thread)
      : work_{context_.get_executor()} {
    expects(count >= 1, "a pool needs a thread");
    threads_.reserve(count);
    try {
      while (threads_.size() < count) {
        threads_.push_back(start([this]() noexcept { context_.run(); }));
      }
    } catch (const std::system_error& error) {
      const std::string which =
          "thread " + std::to_string(threads_.size() + 1) + " of " + std::to_string(count);
      join();
      throw StorageError{"threads for reading",
                         which + " cannot be started; raise the limit of the system or of the user",
                         error.code()};
    } catch (...) {
      join();
      throw;
    }
  }
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;
  ~WorkerThreads() { join(); }

  template <class Task>
  void post(Task&& task) {
    boost::asio::post(context_, std::forward<Task>(task));
  }
  /// @brief Drops what has not begun.
  void stop() noexcept { context_.stop(); }

 private:
  static std::thread start_thread(std::function<void()> run) { return std::thread{std::move(run)}; }
  void join() noexcept {
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  boost::asio::io_context context_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace block_streamer::inline v1
