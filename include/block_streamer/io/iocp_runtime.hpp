// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/io/iocp_calls.hpp>
#include <block_streamer/io/iocp_operation.hpp>
#include <block_streamer/io/iocp_options.hpp>
#include <block_streamer/io/read_group.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief One I/O completion port and its thread, for all storage tiers of a process. Owned by the
/// program, like an io_context. Requests are made by the port's thread alone: one that the system
/// answers at once (a read through its cache) holds up neither the caller nor an I/O loop.
/// **Threads.** Every function from any; completions run on the port's thread, one at a time, and
/// hold up all others while they run.
/// **Lifetime.** Outlives the tiers that use it. The destructor waits for every read; it must not
/// run inside a completion.
/// **Cost.** One allocation a read; a posted packet where the port's thread sleeps.
/// @tparam Calls  the system's, or scripted ones.
template <iocp_calls Calls>
class BasicIocpRuntime {
 public:
  /// @throws ContractViolation for options out of range; StorageError if the system refuses a port.
  explicit BasicIocpRuntime(IocpOptions options = {}, Calls calls = {})
      : options_{(check(options), options)},
        calls_{std::move(calls)},
        port_{::CreateIoCompletionPort(INVALID_HANDLE_VALUE, nullptr, 0, 1)} {
    if (!port_) {
      throw StorageError{"I/O completion port", "cannot be made", detail::last_system_error()};
    }
    thread_ = std::thread{[this]() noexcept { run(); }};
  }
  BasicIocpRuntime(const BasicIocpRuntime&) = delete;
  BasicIocpRuntime& operator=(const BasicIocpRuntime&) = delete;
  ~BasicIocpRuntime() {
    {
      const std::scoped_lock lock{mutex_};
      stopping_ = true;
      wake();
    }
    thread_.join();
  }

  [[nodiscard]] const IocpOptions& options() const noexcept { return options_; }

  /// @brief Lets this port, and never another, hear of the overlapped operations of `file`.
  [[nodiscard]] std::error_code attach(HANDLE file) noexcept {
    if (::CreateIoCompletionPort(file, port_.get(), 0, 0) != nullptr) return {};
    return detail::last_system_error();
  }

  /// @brief Reads all that the file has of `read`, zeros beyond; or fails. Never throws.
  /// @param group  entered now, left after `done` was called; may be nullptr.
  /// @pre the file is attached, and stays open until then; aligned as IocpRead says.
  void async_read(const IocpRead& read, IoCompletion done, ReadGroup* group = nullptr) noexcept {
    auto* const op = new (std::nothrow) IocpOperation{read, std::move(done), group};
    if (op == nullptr) {  // the allocation came first: `done` is still ours
      return done(std::make_error_code(std::errc::not_enough_memory), 0);
    }
    if (group != nullptr) group->enter();
    const std::scoped_lock lock{mutex_};
    op->older = std::exchange(newest_, op);
    if (op->older != nullptr) op->older->newer = op;
    (last_ == nullptr ? first_ : last_->next) = op;
    last_ = op;
    wake();
  }

  /// @brief Ends the reads of `file` that were accepted before: each still completes, with
  /// operation_canceled unless its bytes came first. Does not wait for them.
  void cancel(HANDLE file) noexcept {
    const std::scoped_lock lock{mutex_};
    for (IocpOperation* op = newest_; op != nullptr; op = op->older) {
      if (op->read.file == file) op->cancelled = true;
    }
    static_cast<void>(::CancelIoEx(file, nullptr));  // "not found": nothing is in the system
    wake();
  }

 private:
  using Step = IocpOperation::Step;

  /// @pre the mutex is held.
  void wake() noexcept {
    if (!std::exchange(asleep_, false)) return;
    // Refused only while the system is out of memory of its own, which passes.
    while (::PostQueuedCompletionStatus(port_.get(), 0, 0, nullptr) == 0) ::SwitchToThread();
  }

  void run() noexcept {
    while (issue_all()) reap();
  }

  /// Makes requests as far as the depth allows. @returns false when nothing is left to do and never
  /// will be; else the thread counts as asleep.
  [[nodiscard]] bool issue_all() noexcept {
    for (;;) {
      IocpOperation* op = nullptr;
      {
        const std::scoped_lock lock{mutex_};
        if (stopping_ && newest_ == nullptr) return false;
        if (first_ == nullptr || in_flight_ == options_.queue_depth || starved_) {
          asleep_ = true;
          return true;
        }
        op = std::exchange(first_, first_->next);
        if (first_ == nullptr) last_ = nullptr;
        op->next = nullptr;
        if (op->cancelled) op->error = std::make_error_code(std::errc::operation_canceled);
      }
      op->error ? end(op) : issue(op);
    }
  }

  void issue(IocpOperation* op) noexcept {
    const std::span<std::byte> out = op->next_request();
    if (out.empty()) return end(op);
    const DWORD code = calls_.read(op->read.file, out, op);
    if (code != ERROR_SUCCESS && code != ERROR_IO_PENDING) return answer(op, code, 0);
    ++in_flight_;
    const std::scoped_lock lock{mutex_};
    // Cancelled after it was looked at and before the system had it: nobody else will tell it.
    if (op->cancelled) static_cast<void>(::CancelIoEx(op->read.file, op));
  }

  void reap() noexcept {
    std::array<OVERLAPPED_ENTRY, 64> entries;
    const std::size_t count = calls_.wait(port_.get(), entries);
    {
      const std::scoped_lock lock{mutex_};
      asleep_ = false;
    }
    for (const OVERLAPPED_ENTRY& entry : std::span{entries}.first(count)) {
      if (entry.lpOverlapped == nullptr) continue;  // a wake-up
      auto* const op = static_cast<IocpOperation*>(entry.lpOverlapped);
      --in_flight_;
      starved_ = false;
      DWORD byte_count = 0;
      const BOOL good = ::GetOverlappedResult(op->read.file, op, &byte_count, FALSE);
      answer(op, good != 0 ? ERROR_SUCCESS : ::GetLastError(), byte_count);
    }
  }

  void answer(IocpOperation* op, DWORD code, DWORD byte_count) noexcept {
    const Step step = op->answered(code, byte_count);
    if (step == Step::again || (step == Step::later && in_flight_ != 0)) {
      starved_ = step == Step::later;
      op->error.clear();
      const std::scoped_lock lock{mutex_};
      op->next = first_;  // before those that came after it
      first_ = op;
      if (last_ == nullptr) last_ = op;
      return;
    }
    end(op);
  }

  void end(IocpOperation* op) noexcept {
    {
      const std::scoped_lock lock{mutex_};
      if (op->older != nullptr) op->older->newer = op->newer;
      (op->newer != nullptr ? op->newer->older : newest_) = op->older;
    }
    const IocpRead read = op->read;
    const std::error_code error = op->error;
    ReadGroup* const group = op->group;
    IoCompletion done = std::move(op->done);
    delete op;
    if (!error) {
      std::ranges::fill(read.out.subspan(static_cast<std::size_t>(read.needed)), std::byte{0});
    }
    done(error, error ? 0 : read.out.size());
    if (group != nullptr) group->leave();
  }

  IocpOptions options_;
  Calls calls_;  // the thread's
  detail::WindowsHandle port_;
  std::uint32_t in_flight_ = 0;     // the thread's
  bool starved_ = false;            // the thread's: the system had no room for a request
  std::mutex mutex_;                // guards everything below but the thread
  IocpOperation* first_ = nullptr;  ///< waiting for their turn
  IocpOperation* last_ = nullptr;
  IocpOperation* newest_ = nullptr;  ///< all accepted and not ended
  bool stopping_ = false;
  bool asleep_ = false;  ///< the thread waits, or is about to
  std::thread thread_;   // last: it uses everything above
};

/// The process's completion port. @see BasicIocpRuntime
using IocpRuntime = BasicIocpRuntime<SystemIocpCalls>;

}  // namespace block_streamer::inline v1
