// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/io/progress_loop.hpp>

#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A progress_loop without a thread: tasks run inside `wait_until` and `run_all`, on the
/// caller's thread, in the order of their posts or in one that a test chooses. The same program
/// gives the same run each time, and waiting for what cannot come is an exception, not a hang.
/// **Threads.** `post` from any thread; everything else from one.
class InlineLoop {
 public:
  /// Given how many tasks are queued (at least one), says which runs next.
  using Order = std::function<std::size_t(std::size_t queued)>;
  /// Asked when nothing is queued and the wait is not over: makes something happen (releases a held
  /// read, advances a clock) and returns true, or returns false.
  using Idle = std::function<bool()>;

  InlineLoop() = default;
  explicit InlineLoop(Order order, Idle idle = {})
      : order_{std::move(order)}, idle_{std::move(idle)} {}

  void post(void (*task)(void*) noexcept, void* context) {
    const std::scoped_lock lock{mutex_};
    queue_.emplace_back(task, context);
  }

  /// @throws ContractViolation if nothing is queued, `idle` cannot help and `done` is still false.
  void wait_until(bool (*done)(void*), void* context) {
    while (!done(context)) {
      if (run_one() || (idle_ && idle_())) continue;
      throw ContractViolation{"waiting for something that no queued task can bring about"};
    }
  }

  /// @brief Runs one task; false if none is queued.
  bool run_one() {
    const std::optional<Task> task = take();
    if (task) task->first(task->second);
    return task.has_value();
  }
  /// @brief Runs tasks, those they post included, until none is queued; returns their number.
  std::size_t run_all() {
    std::size_t count = 0;
    while (run_one()) ++count;
    return count;
  }
  [[nodiscard]] std::size_t queued() const {
    const std::scoped_lock lock{mutex_};
    return queue_.size();
  }

 private:
  using Task = std::pair<void (*)(void*) noexcept, void*>;

  std::optional<Task> take() {
    const std::scoped_lock lock{mutex_};
    if (queue_.empty()) return std::nullopt;
    const std::size_t index = order_ ? order_(queue_.size()) % queue_.size() : 0;
    const auto position = queue_.begin() + static_cast<std::ptrdiff_t>(index);
    const Task task = *position;
    queue_.erase(position);
    return task;
  }

  mutable std::mutex mutex_;  // guards queue_
  std::deque<Task> queue_;
  Order order_;
  Idle idle_;
};
static_assert(progress_loop<InlineLoop>);

}  // namespace block_streamer::inline v1
