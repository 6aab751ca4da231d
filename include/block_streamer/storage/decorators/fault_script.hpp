// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/io_completion.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Says what becomes of each read of a FaultyStorage, by its number: reads are counted from
/// 0 in the order in which they are started. Faults of one read combine; what no rule names passes.
/// **Threads.** Any. Completions that a release lets go run on the releasing thread.
/// **Lifetime.** Outlives the tier that was given it; one tier per script.
class FaultScript {
 public:
  using Number = std::uint64_t;

  FaultScript() = default;
  FaultScript(const FaultScript&) = delete;
  FaultScript& operator=(const FaultScript&) = delete;

  /// @brief Read `n` ends with `error`; the tier below never sees it.
  void fail(Number n, std::error_code error) {
    locked([&] { failures_[n] = error; });
  }
  /// @brief So does every read from `n` on that has no error of its own: a drive that died.
  void fail_from(Number n, std::error_code error) {
    locked([&] { dead_from_ = {n, error}; });
  }
  /// @brief Only the first `byte_count` bytes of read `n` arrive, and it ends with an error.
  void shorten(Number n, std::uint64_t byte_count) {
    locked([&] { short_[n] = byte_count; });
  }
  /// @brief Read `n` does not begin until released: its bytes are written late.
  void hold(Number n) {
    locked([&] { held_begins_.insert(n); });
  }
  /// @brief None from `n` on begins until released.
  void hold_from(Number n) {
    locked([&] { held_from_ = n; });
  }
  /// @brief The bytes of read `n` arrive, but nobody is told until it is released.
  void hold_completion(Number n) {
    locked([&] { held_ends_.insert(n); });
  }
  /// @brief The bytes of read `n` arrive, but it is reported only after `others` reads that began
  /// later, or once nothing else is in flight: late, but never stuck.
  void delay(Number n, std::uint64_t others) {
    locked([&] { delays_[n] = others; });
  }
  /// @brief These reads are reported in this order and one after another, whenever they finish.
  /// @pre none of them was started, none is in another order.
  void report_in_order(std::vector<Number> order) {
    locked([&] { orders_.push_back({std::move(order), {}, 0}); });
  }

  /// @brief Lets read `n` go, or pass freely if it comes later; orders still hold.
  void release(Number n) {
    std::optional<IoCompletion> held;
    locked([&] {
      released_.insert(n);
      if (const auto found = waiting_.find(n); found != waiting_.end()) {
        held = std::move(found->second);
        waiting_.erase(found);
      }
    });
    if (held) (*held)({}, 0);
  }
  /// @brief Forgets every hold and order, lets go what is held in the order of its numbers.
  void release_all() { let_go_all({}); }

  /// @brief Reads started so far.
  [[nodiscard]] Number started() const {
    const std::scoped_lock lock{mutex_};
    return started_;
  }
  /// @brief Blocks until that many reads were started.
  void wait_for_started(Number count) const {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return started_ >= count; });
  }
  /// @brief Reads that a release would let go now.
  [[nodiscard]] std::size_t held() const {
    const std::scoped_lock lock{mutex_};
    return waiting_.size();
  }
  /// @brief Blocks until that many reads are held.
  void wait_for_held(std::size_t count) const {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return waiting_.size() >= count; });
  }

 private:
  template <class Inner>
  friend class FaultyStorage;

  struct Fate {
    Number number;
    std::error_code error;
    std::optional<std::uint64_t> byte_count;
  };
  struct Order {
    std::vector<Number> numbers;
    std::map<Number, IoCompletion> arrived;
    std::size_t next;
  };

  template <class Change>
  void locked(Change change) {
    {
      const std::scoped_lock lock{mutex_};
      change();
    }
    changed_.notify_all();
  }

  Fate start() {
    Fate fate{};
    locked([&] {
      fate.number = started_++;
      if (fate.number >= dead_from_.first) fate.error = dead_from_.second;
      if (const auto f = failures_.find(fate.number); f != failures_.end()) fate.error = f->second;
      if (const auto s = short_.find(fate.number); s != short_.end()) fate.byte_count = s->second;
    });
    return fate;
  }
  /// Calls `go` now, or when read `n` is released; with an error if the tier ends before that.
  void begin(Number n, IoCompletion go) {
    pass(n, std::move(go), [&] { return held_begins_.contains(n) || n >= held_from_; });
  }
  void end(Number n, IoCompletion report) {
    pass(n,
         IoCompletion{[this, n, report = std::move(report)](std::error_code, std::size_t) mutable {
           in_time(n, IoCompletion{[this, n, report = std::move(report)](std::error_code,
                                                                         std::size_t) mutable {
                     std::vector<Late> due = reported(n);
                     report({}, 0);
                     for (Late& late : due) in_order(late.number, std::move(late.report));
                   }});
         }},
         [&] { return held_ends_.contains(n); });
  }
  template <class Held>
  void pass(Number n, IoCompletion go, Held is_held) {
    bool kept = false;
    locked([&] {
      kept = !closing_ && !released_.contains(n) && is_held();
      if (kept) waiting_.emplace(n, std::move(go));
    });
    if (!kept) go({}, 0);
  }

  struct Late {
    Number number;
    std::uint64_t others;
    IoCompletion report;
  };
  void in_time(Number n, IoCompletion report) {
    bool kept = false;
    locked([&] {
      const auto delay = delays_.find(n);
      kept = !closing_ && delay != delays_.end() && delay->second > 0 && others_in_flight() > 1;
      if (kept) late_.push_back({n, delay->second, std::move(report)});
    });
    if (!kept) in_order(n, std::move(report));
  }
  /// Reads that were begun, not reported, and are not late.
  [[nodiscard]] Number others_in_flight() const { return started_ - reported_ - late_.size(); }
  /// Takes note of a report, returns the late reads whose time has come with it.
  std::vector<Late> reported(Number n) {
    std::vector<Late> due;
    locked([&] {
      ++reported_;
      const bool nothing_else = others_in_flight() == 0;
      for (std::size_t i = 0; i < late_.size();) {
        Late& late = late_[i];
        if (nothing_else || (late.number < n && --late.others == 0)) {
          due.push_back(std::move(late));
          late_.erase(late_.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
          ++i;
        }
      }
    });
    return due;
  }

  void in_order(Number n, IoCompletion report) {
    std::unique_lock lock{mutex_};
    const auto order = std::ranges::find_if(
        orders_, [n](const Order& o) { return std::ranges::count(o.numbers, n) != 0; });
    if (order == orders_.end()) {
      lock.unlock();
      report({}, 0);
      return;
    }
    order->arrived.emplace(n, std::move(report));
    report_arrived(static_cast<std::size_t>(order - orders_.begin()), lock);
  }
  /// `next` moves on only after its report has returned, so no thread overtakes another.
  void report_arrived(std::size_t index, std::unique_lock<std::mutex>& lock) {
    while (index < orders_.size()) {
      Order& order = orders_[index];
      if (order.next == order.numbers.size()) return;
      const auto found = order.arrived.find(order.numbers[order.next]);
      if (found == order.arrived.end()) return;
      IoCompletion report = std::move(found->second);
      order.arrived.erase(found);
      lock.unlock();
      report({}, 0);
      lock.lock();
      if (index >= orders_.size()) return;  // released meanwhile
      ++orders_[index].next;
    }
  }

  void let_go_all(std::error_code error) {
    std::map<Number, IoCompletion> waiting;
    std::vector<Order> orders;
    std::vector<Late> late;
    locked([&] {
      if (error) closing_ = true;
      delays_.clear();
      late.swap(late_);
      held_begins_.clear();
      held_ends_.clear();
      held_from_ = std::numeric_limits<Number>::max();
      waiting.swap(waiting_);
      orders.swap(orders_);
    });
    for (auto& [number, go] : waiting) go(error, 0);
    for (Late& read : late) read.report({}, 0);
    for (Order& order : orders) {
      for (auto& [number, report] : order.arrived) report({}, 0);
    }
  }
  void close() { let_go_all(std::make_error_code(std::errc::operation_canceled)); }

  mutable std::mutex mutex_;  // guards everything below
  mutable std::condition_variable changed_;
  Number started_ = 0;
  Number reported_ = 0;
  bool closing_ = false;
  std::map<Number, std::error_code> failures_;
  std::map<Number, std::uint64_t> short_;
  std::pair<Number, std::error_code> dead_from_{std::numeric_limits<Number>::max(), {}};
  std::set<Number> held_begins_;
  std::set<Number> held_ends_;
  Number held_from_ = std::numeric_limits<Number>::max();
  std::set<Number> released_;
  std::map<Number, IoCompletion> waiting_;
  std::vector<Order> orders_;
  std::map<Number, std::uint64_t> delays_;
  std::vector<Late> late_;
};

}  // namespace block_streamer::inline v1
