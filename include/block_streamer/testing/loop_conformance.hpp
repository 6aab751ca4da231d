// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/progress_loop.hpp>
#include <block_streamer/testing/conformance.hpp>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::testing {

struct LoopSuiteOptions {
  bool posts_from_threads = true;  ///< false for loops that live on one thread altogether
};

namespace detail {

/// Numbered tasks and the order in which they ran.
class Tasks {
 public:
  explicit Tasks(std::size_t count) : tasks_(count) {
    for (std::size_t i = 0; i < count; ++i) tasks_[i] = {this, i};
  }
  template <class Loop>
  void post(Loop& loop, std::size_t number) {
    loop.post(
        [](void* context) noexcept {
          const Task& task = *static_cast<Task*>(context);
          task.all->ran(task.number);
        },
        &tasks_[number]);
  }
  template <class Loop>
  void wait_for(Loop& loop, std::size_t count) {
    std::pair<Tasks*, std::size_t> wanted{this, count};
    loop.wait_until(
        [](void* context) {
          const auto& [tasks, n] = *static_cast<std::pair<Tasks*, std::size_t>*>(context);
          return tasks->order().size() >= n;
        },
        &wanted);
  }
  [[nodiscard]] std::vector<std::size_t> order() const {
    const std::scoped_lock lock{mutex_};
    return order_;
  }

 private:
  struct Task {
    Tasks* all = nullptr;
    std::size_t number = 0;
  };
  void ran(std::size_t number) {
    const std::scoped_lock lock{mutex_};
    order_.push_back(number);
  }
  mutable std::mutex mutex_;  // guards order_
  std::vector<std::size_t> order_;
  std::vector<Task> tasks_;
};

/// A task that posts itself again until it ran so many times.
template <class Loop>
struct Chain {
  Loop* loop;
  std::size_t left;
  std::mutex mutex{};  // guards left
  void start() {
    loop->post([](void* self) noexcept { static_cast<Chain*>(self)->step(); }, this);
  }
  void step() noexcept {
    const std::scoped_lock lock{mutex};
    if (--left > 0) start();
  }
  static bool over(void* self) {
    auto& chain = *static_cast<Chain*>(self);
    const std::scoped_lock lock{chain.mutex};
    return chain.left == 0;
  }
};

}  // namespace detail

/// @brief Checks that a loop keeps the promises of progress_loop: order, tasks that post, waits.
/// @pre nobody else uses the loop. A loop that breaks its promise of progress makes this hang.
template <progress_loop Loop>
Conformance check_progress_loop(Loop& loop, Report report, LoopSuiteOptions options = {}) {
  Checks checks{std::move(report)};
  loop.wait_until([](void*) { return true; }, nullptr);

  constexpr std::size_t count = 1000;
  detail::Tasks tasks{count};
  for (std::size_t i = 0; i < count; ++i) tasks.post(loop, i);
  tasks.wait_for(loop, count);
  std::vector<std::size_t> in_order(count);
  std::iota(in_order.begin(), in_order.end(), std::size_t{0});
  checks.expect(tasks.order() == in_order, "tasks run once each, in the order of their posts",
                [&] { return std::to_string(tasks.order().size()) + " ran"; });

  detail::Chain<Loop> chain{&loop, count};
  chain.start();
  loop.wait_until(&detail::Chain<Loop>::over, &chain);
  checks.expect(chain.left == 0, "a task may post the next one", "");

  if (options.posts_from_threads) {
    detail::Tasks shared{2 * count};
    const auto post = [&](std::size_t parity) {
      for (std::size_t i = parity; i < 2 * count; i += 2) shared.post(loop, i);
    };
    std::thread other{post, std::size_t{1}};
    post(0);
    other.join();
    shared.wait_for(loop, 2 * count);
    std::vector<std::size_t> even, odd;
    for (const std::size_t n : shared.order()) (n % 2 == 0 ? even : odd).push_back(n);
    checks.expect(even.size() == count && odd.size() == count && std::ranges::is_sorted(even) &&
                      std::ranges::is_sorted(odd),
                  "posts of one thread keep their order among those of others",
                  [&] { return std::to_string(shared.order().size()) + " ran"; });
  }
  return checks.result();
}

}  // namespace block_streamer::inline v1::testing
