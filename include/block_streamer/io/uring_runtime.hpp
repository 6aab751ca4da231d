// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(_WIN32)
#error \
    "block_streamer/io/uring_runtime.hpp: io_uring is Linux's; on Windows use storage/iocp_storage.hpp"
#endif

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/io/read_group.hpp>
#include <block_streamer/io/ring_reader.hpp>
#include <block_streamer/io/uring_options.hpp>
#include <block_streamer/io/uring_ring.hpp>

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One io_uring and its thread, for all storage tiers of a process: limits on rings and on
/// pinned memory are per user, so one is better than many. Owned by the program, like an
/// io_context. Where the system refuses a ring (containers do) or the program was built without
/// liburing, it exists all the same, is not running, and says why; tiers then read on threads.
/// **Threads.** Every function from any; completions run on the ring's thread, one at a time, and
/// hold up all others while they run.
/// **Cancellation.** None: a read that the drive has begun cannot be called back.
/// **Lifetime.** Outlives the tiers that use it. The destructor waits for every read.
/// **Cost.** One allocation a read; a system call where the ring's thread sleeps.
/// @tparam Ring  the system's, or a scripted one.
template <read_ring Ring>
class BasicUringRuntime {
 public:
  using Open = std::function<std::unique_ptr<Ring>(const UringOptions&, UringReport&)>;

  /// @throws ContractViolation for options out of range. A refused ring throws nothing.
  explicit BasicUringRuntime(UringOptions options = {}, Open open = &Ring::open)
      : options_{(check(options), options)} {
    // A ring belongs to the thread that opened it.
    thread_ = std::thread{[this, open = std::move(open)]() noexcept { run(open); }};
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [this] { return opened_; });
  }
  BasicUringRuntime(const BasicUringRuntime&) = delete;
  BasicUringRuntime& operator=(const BasicUringRuntime&) = delete;
  ~BasicUringRuntime() {
    {
      const std::scoped_lock lock{mutex_};
      stopping_ = true;
      if (ring_ != nullptr) ring_->wake();
    }
    thread_.join();
  }

  [[nodiscard]] const UringOptions& options() const noexcept { return options_; }
  [[nodiscard]] bool running() const {
    const std::scoped_lock lock{mutex_};
    return report_.running;
  }
  [[nodiscard]] UringReport report() const {
    const std::scoped_lock lock{mutex_};
    return report_;
  }

  /// @brief Reads all that the file has of `read`, zeros beyond; or fails. Never throws.
  /// @param group  entered now, left after `done` was called; may be nullptr.
  /// @pre running(); aligned as FileRead says.
  void async_read(const FileRead& read, IoCompletion done, ReadGroup* group = nullptr) noexcept {
    if (group != nullptr) group->enter();
    RingOperation* const op = RingOperation::make(read, done, group);
    if (op == nullptr) {
      done(std::make_error_code(std::errc::not_enough_memory), 0);
      if (group != nullptr) group->leave();
      return;
    }
    op->asked = read.out.first(static_cast<std::size_t>(
        std::min<std::uint64_t>(round_up(read.needed, read.alignment), read.out.size())));
    if (op->asked.empty()) return RingOperation::end(op);
    const std::scoped_lock lock{mutex_};
    (last_ == nullptr ? first_ : last_->next) = op;
    last_ = op;
    wake();
  }

  /// @brief Pins memory that reads will go to, until unpin(). What cannot be pinned is read into
  /// all the same. @pre not called inside a completion.
  void pin(std::span<std::byte> memory) noexcept { ask({memory, true}); }
  /// @brief @pre no read into `memory` is in flight; not called inside a completion.
  void unpin(std::span<std::byte> memory) noexcept { ask({memory, false}); }

 private:
  struct PinRequest {
    std::span<std::byte> memory;
    bool pin = false;
    bool answered = false;
    PinRequest* next = nullptr;
  };

  /// @pre the mutex is held.
  void wake() noexcept {
    if (std::exchange(asleep_, false)) ring_->wake();
  }
  void ask(PinRequest request) noexcept {
    std::unique_lock lock{mutex_};
    if (!report_.running) return;
    request.next = std::exchange(pin_requests_, &request);
    wake();
    changed_.wait(lock, [&request] { return request.answered; });
  }

  void run(const Open& open) noexcept {
    UringReport report;
    std::unique_ptr<Ring> ring;
    try {
      ring = open(options_, report);
    } catch (const std::exception& error) {
      report.refusal = error.what();
    }
    report.running = ring != nullptr;
    {
      const std::scoped_lock lock{mutex_};
      report_ = std::move(report);
      ring_ = ring.get();
      opened_ = true;
      changed_.notify_all();
    }
    if (!ring) return;
    RingReader<Ring> reader{*ring, options_};
    while (take_work(reader)) reader.turn();
  }
  /// @returns false when there is nothing left to do and never will be.
  [[nodiscard]] bool take_work(RingReader<Ring>& reader) noexcept {
    const std::scoped_lock lock{mutex_};
    while (first_ != nullptr) {
      RingOperation* const op = std::exchange(first_, first_->next);
      op->next = nullptr;
      reader.accept(op);
    }
    last_ = nullptr;
    while (pin_requests_ != nullptr)
      answer(reader, *std::exchange(pin_requests_, pin_requests_->next));
    if (report_.fixed_buffers_refusal.empty())
      report_.fixed_buffers_refusal = reader.fixed_refusal();
    if (stopping_ && reader.idle()) {
      ring_ = nullptr;
      return false;
    }
    asleep_ = true;
    return true;
  }
  void answer(RingReader<Ring>& reader, PinRequest& request) noexcept {
    request.pin ? reader.pin(request.memory) : reader.unpin(request.memory);
    report_.fixed_byte_count = reader.fixed_byte_count();
    request.answered = true;
    changed_.notify_all();
  }

  UringOptions options_;
  mutable std::mutex mutex_;  // guards everything below but the thread
  std::condition_variable changed_;
  UringReport report_;
  Ring* ring_ = nullptr;            ///< the thread's; for wake()
  RingOperation* first_ = nullptr;  ///< not seen by the thread yet
  RingOperation* last_ = nullptr;
  PinRequest* pin_requests_ = nullptr;
  bool opened_ = false;
  bool stopping_ = false;
  bool asleep_ = false;  ///< the thread waits, or is about to
  std::thread thread_;   // last: it uses everything above
};

/// The process's ring. @see BasicUringRuntime
using UringRuntime = BasicUringRuntime<UringRing>;

}  // namespace block_streamer::inline v1
