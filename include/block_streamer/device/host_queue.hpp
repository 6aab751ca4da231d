// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>

namespace block_streamer::inline v1 {

/// How HostBackend runs its streams: at once on the calling thread, or each on a thread of its own.
enum class HostMode : std::uint8_t { attached, detached };

namespace detail {

class HostQueue;

/// A place in a queue: passed once everything up to it has run. Empty: never recorded.
struct HostPoint {
  std::shared_ptr<HostQueue>
      queue;  ///< shared: an event outlives the stream that it was recorded on
  std::uint64_t ticket = 0;

  [[nodiscard]] bool passed() const;
  std::error_code block() const noexcept;
};

/// @brief The operations of one host stream, in order. Attached: each runs inside the call that
/// enqueues it, under the queue's mutex, so that one stream stays one order whoever calls.
/// Detached: a thread runs them.
/// **Threads.** Everything from any thread; guarded by one mutex, never held while a detached
/// operation runs.
class HostQueue {
 public:
  explicit HostQueue(HostMode mode) : detached_{mode == HostMode::detached} {
    if (detached_) thread_ = std::thread{[this] { run(); }};
  }
  HostQueue(const HostQueue&) = delete;
  HostQueue& operator=(const HostQueue&) = delete;
  ~HostQueue() { close(); }

  void copy(std::span<std::byte> to, std::span<const std::byte> from) { enqueue(Copy{to, from}); }

  /// @brief The queue waits for `point`, which lies on another queue or earlier on this one.
  void wait(HostPoint point) {
    if (point.queue.get() == this) return;  // the order of the queue says it already
    // Attached streams have passed every point; looking takes that queue's mutex, and so orders
    // this thread after what ran there.
    if (!detached_) (void)point.passed();
    enqueue(Wait{std::move(point)});
  }

  /// @returns the number by which `passed` and `block_until` know everything enqueued so far.
  std::uint64_t mark() { return enqueue(Mark{}); }

  [[nodiscard]] bool passed(std::uint64_t ticket) {
    const std::lock_guard lock{mutex_};
    return finished_ >= ticket;
  }

  void block_until(std::uint64_t ticket) {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return finished_ >= ticket; });
  }

  [[nodiscard]] bool detached() const noexcept { return detached_; }

  /// @brief What is enqueued from now on waits for `resume`. @pre detached().
  void pause() {
    std::uint64_t gate = 0;
    {
      const std::lock_guard lock{mutex_};
      gate = ++gates_;
    }
    enqueue(Gate{gate});
  }

  void resume() {
    const std::lock_guard lock{mutex_};
    open_gates_ = gates_;
    changed_.notify_all();
  }

  /// @brief Runs what is queued (a pause ends here) and stops. Called once more, does nothing.
  void close() noexcept {
    {
      const std::lock_guard lock{mutex_};
      closing_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Copy {
    std::span<std::byte> to;
    std::span<const std::byte> from;
  };
  struct Wait {
    HostPoint point;
  };
  struct Gate {
    std::uint64_t number;
  };
  struct Mark {};
  using Operation = std::variant<Mark, Copy, Wait, Gate>;

  std::uint64_t enqueue(Operation operation) {
    const std::lock_guard lock{mutex_};
    if (detached_) {
      operations_.push_back(std::move(operation));
      changed_.notify_all();
    } else {
      if (const Copy* copy = std::get_if<Copy>(&operation)) execute(*copy);
      ++finished_;
    }
    return ++enqueued_;
  }

  void run() noexcept {
    std::unique_lock lock{mutex_};
    for (;;) {
      changed_.wait(lock, [&] { return closing_ || !operations_.empty(); });
      if (operations_.empty()) return;
      {
        const Operation operation = std::move(operations_.front());
        operations_.pop_front();
        lock.unlock();
        std::visit([this](const auto& o) { execute(o); }, operation);
      }
      lock.lock();
      ++finished_;
      changed_.notify_all();
    }
  }

  void execute(const Mark&) noexcept {}
  void execute(const Copy& copy) noexcept {
    std::memcpy(copy.to.data(), copy.from.data(), copy.from.size());
  }
  void execute(const Wait& wait) noexcept { wait.point.block(); }
  void execute(const Gate& gate) noexcept {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return closing_ || open_gates_ >= gate.number; });
  }

  const bool detached_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> operations_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t gates_ = 0;
  std::uint64_t open_gates_ = 0;
  bool closing_ = false;
  std::thread thread_;  // last: it uses all of the above
};

inline bool HostPoint::passed() const {
  return queue->passed(ticket);
}
inline std::error_code HostPoint::block() const noexcept {
  queue->block_until(ticket);
  return {};
}

}  // namespace detail
}  // namespace block_streamer::inline v1
