// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <cstddef>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Time that passes only when somebody waits: a queue of events, each at its virtual time.
/// The same program gives the same run, and waiting for what no event can bring about is an
/// exception, not a hang.
/// **Threads.** One. **Lifetime.** Outlives everything that was given it. Run it dry before what
/// its events refer to goes.
class VirtualClock {
 public:
  using Task = std::function<void()>;
  /// Given how many events are due at the same time (at least two), says which comes first.
  using Order = std::function<std::size_t(std::size_t due)>;

  VirtualClock() = default;
  /// @param order  default: the order in which they were scheduled.
  /// @param tasks_compete  whether tasks given to soon() take part in that, as if the thread that
  /// runs them could be late.
  explicit VirtualClock(Order order, bool tasks_compete = false)
      : order_{std::move(order)}, tasks_compete_{tasks_compete} {}
  VirtualClock(const VirtualClock&) = delete;
  VirtualClock& operator=(const VirtualClock&) = delete;

  [[nodiscard]] Nanoseconds now() const noexcept { return now_; }
  /// @brief Events that have not happened.
  [[nodiscard]] std::size_t pending() const noexcept { return tasks_.size() + events_.size(); }

  /// @throws ContractViolation if `time` has passed.
  void at(Nanoseconds time, Task task) {
    expects(time >= now_, "an event lies in the past");
    events_.emplace(time, std::move(task));
  }
  void after(Nanoseconds delay, Task task) { at(now_ + delay, std::move(task)); }

  /// @brief Runs the task before the next event, after the tasks that wait already.
  void soon(Task task) {
    if (tasks_compete_) return after({}, std::move(task));
    tasks_.push_back(std::move(task));
  }

  /// @brief Runs the next task, or goes to the next event and lets it happen; false if there is
  /// none.
  bool run_one() {
    if (!tasks_.empty()) {
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
      return true;
    }
    if (events_.empty()) return false;
    auto next = events_.begin();
    if (order_) {
      const auto due = static_cast<std::size_t>(events_.count(next->first));
      if (due > 1) std::advance(next, static_cast<std::ptrdiff_t>(order_(due) % due));
    }
    now_ = next->first;
    const Task task = std::move(next->second);
    events_.erase(next);
    task();
    return true;
  }
  /// @throws ContractViolation if `done()` is false and nothing is left to happen.
  template <class Done>
  void run_until(Done&& done) {
    while (!done()) {
      if (!run_one()) {
        throw ContractViolation{"waiting for something that no virtual event can bring about"};
      }
    }
  }
  /// @brief Everything that is due within `duration` happens; then it is that much later. What a
  /// host thread does that computes for so long.
  void advance(Nanoseconds duration) {
    const Nanoseconds end = now_ + duration;
    while (!tasks_.empty() || (!events_.empty() && events_.begin()->first <= end)) run_one();
    now_ = end;
  }
  void run_dry() {
    while (run_one()) {
    }
  }

 private:
  Nanoseconds now_{};
  std::multimap<Nanoseconds, Task> events_;  ///< equal times in the order of scheduling
  std::deque<Task> tasks_;                   ///< due before any event
  Order order_;
  bool tasks_compete_ = false;
};

}  // namespace block_streamer::inline v1
