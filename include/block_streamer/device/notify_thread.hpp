// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/io_completion.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace block_streamer::inline v1::detail {

/// @brief One thread that waits for points on a device's queues, in the order of their posting, and
/// calls what waits for each. `Point` is movable and has `std::error_code block() noexcept`; it is
/// released before its completion runs, so a completion may reuse or destroy what the point held.
/// **Threads.** `post` from any thread, also from a completion. **Lifetime.** The destructor
/// delivers all that was posted; a completion may itself destroy the last owner of this object.
template <class Point>
class NotifyThread {
 public:
  NotifyThread() : shared_{std::make_shared<Shared>()} {
    thread_ = std::thread{[shared = shared_] { run(*shared); }};
  }
  NotifyThread(const NotifyThread&) = delete;
  NotifyThread& operator=(const NotifyThread&) = delete;
  ~NotifyThread() {
    {
      const std::lock_guard lock{shared_->mutex};
      shared_->stopping = true;
    }
    shared_->changed.notify_one();
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  /// @brief Calls `reached` on the thread of this object once `point` was passed.
  void post(Point point, IoCompletion reached) {
    {
      const std::lock_guard lock{shared_->mutex};
      shared_->items.push_back(Item{std::move(point), std::move(reached)});
    }
    shared_->changed.notify_one();
  }

 private:
  struct Item {
    Point point;
    IoCompletion reached;
  };
  /// Shared with the thread because a completion may destroy the NotifyThread that runs it.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> items;
    bool stopping = false;
  };

  static void run(Shared& shared) noexcept {
    std::unique_lock lock{shared.mutex};
    for (;;) {
      shared.changed.wait(lock, [&] { return shared.stopping || !shared.items.empty(); });
      if (shared.items.empty()) return;
      Item item = std::move(shared.items.front());
      shared.items.pop_front();
      lock.unlock();
      deliver(std::move(item));
      lock.lock();
    }
  }

  static void deliver(Item item) noexcept {
    std::error_code error;
    {
      Point point = std::move(item.point);
      error = point.block();
    }
    item.reached(error, 0);
  }

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace block_streamer::inline v1::detail
