// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/io/progress_loop.hpp>
#include <block_streamer/pipeline/failure.hpp>
#include <block_streamer/pipeline/fetch_inbox.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/pipeline/pipeline_shape.hpp>
#include <block_streamer/pipeline/visible_lock.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/trace/residency_observer.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A FetchMachine where threads meet: its mutex, what was reported to it and not yet taken,
/// its first failure, and whether a pump is on its way that will ask it for actions. Performs none.
/// **Threads.** `lock`, `deliver`, `failed_with`, `suspect_slots`: any. `next_action`: the pump.
/// Everything else: the visitor. Under the mutex it posts to the loop, calls the residency observer
/// and asks the backend for the time; nothing else of others.
/// **Lifetime.** Not movable: waits point to it. Backend, loop and pump outlive its use.
template <execution_backend Backend, progress_loop Loop, class Rules>
class SharedMachine {
  using Guard = VisibleLock<Backend>;
  using Machine = FetchMachine<Rules>;

 public:
  /// What the loop runs when there may be something to do: asks `next_action` until there is none.
  struct Pump {
    void (*run)(void*) noexcept;
    void* context;
  };

  /// The machine with its mutex held: for one expression or one scope, in which the thread calls
  /// nothing else of SharedMachine.
  class Locked {
   public:
    [[nodiscard]] Machine* operator->() const noexcept { return &shared_.machine_; }
    /// @brief Forgets the failure, but not that the device is lost, and what every slot holds.
    /// @pre nothing is in flight, no visit runs.
    void clear() const {
      if (shared_.machine_.failed()) shared_.machine_.reset_failure();
      shared_.failure_.clear();
      shared_.machine_.evict_all();
    }

   private:
    friend SharedMachine;
    explicit Locked(SharedMachine& shared)
        : guard_{shared.mutex_, shared.backend_}, shared_{shared} {}
    Guard guard_;
    SharedMachine& shared_;
  };

  SharedMachine(Backend& backend, Loop& loop, const PipelineShape& shape,
                ResidencyObserverRef observer, Pump pump)
      : backend_{backend},
        loop_{loop},
        pump_{pump},
        machine_{shape.mode, shape.transfer.slot_count, shape.transfer.ticket_count, observer},
        inbox_{shape.transfer.ticket_count} {}
  SharedMachine(const SharedMachine&) = delete;
  SharedMachine& operator=(const SharedMachine&) = delete;

  [[nodiscard]] Locked lock() { return Locked{*this}; }
  /// @brief The latest pass. Without the mutex: only the visitor begins passes.
  [[nodiscard]] std::uint64_t epoch() const noexcept { return machine_.epoch(); }

  // ---- progress
  /// @brief Has the loop pump, unless it is about to.
  void schedule_pump() {
    Guard guard{mutex_, backend_};
    schedule();
  }
  /// @brief The next thing to do; nullopt once there is nothing, and the next event will schedule
  /// the pump again.
  [[nodiscard]] std::optional<FetchAction> next_action() noexcept {
    try {
      Guard guard{mutex_, backend_};
      inbox_.deliver_to(machine_);
      auto action = machine_.next();
      pump_scheduled_ = action.has_value();
      return action;
    } catch (...) {  // an impossible move: a broken rule is reported, not obeyed
      Guard guard{mutex_, backend_};
      failure_.set(std::current_exception());
      machine_.fail();
      pump_scheduled_ = false;
      if (!inbox_.empty()) schedule();
      return std::nullopt;
    }
  }
  /// @brief A read or a copy ended, well or not.
  void deliver(FetchEvent event, std::uint32_t ticket) noexcept {
    Guard guard{mutex_, backend_};
    inbox_.push(event, ticket);
    schedule();
  }

  // ---- failures
  /// @brief Keeps the cause if it is the first, and grants nothing more.
  void failed_with(std::exception_ptr cause) noexcept {
    Guard guard{mutex_, backend_};
    failure_.set(std::move(cause));
    machine_.fail();
  }
  /// @brief The device failed in a copy that had been issued: what is in the slots is not to be
  /// trusted.
  void suspect_slots() noexcept {
    Guard guard{mutex_, backend_};
    slots_suspect_ = true;
  }
  /// @throws the first cause, once; everything is usable again when it is thrown.
  void throw_if_failed() {
    std::exception_ptr cause;
    {
      Guard guard{mutex_, backend_};
      if (!machine_.failed()) return;
      cause = failure_.cause();
    }
    recover();
    std::rethrow_exception(cause);
  }
  /// @throws DeviceError after a sticky device error.
  void rethrow_if_lost() {
    Guard guard{mutex_, backend_};
    failure_.rethrow_if_lost();
  }
  /// @pre wait_quiet() has returned.
  [[nodiscard]] bool lost() const noexcept { return failure_.lost(); }

  // ---- waiting
  /// @brief Until the visit's part is in its slot to stay, or something has failed.
  void wait_usable(const PlannedVisit& visit) {
    VisitWait wait{this, &visit};
    const auto usable = [](void* context) {
      const auto& w = *static_cast<VisitWait*>(context);
      Guard guard{w.self->mutex_, w.self->backend_};
      return w.self->machine_.usable(*w.visit) || w.self->machine_.failed();
    };
    if (usable(&wait)) return;
    const Nanoseconds begin = backend_.now();
    loop_.wait_until(usable, &wait);
    Guard guard{mutex_, backend_};
    machine_.slots.statistics.storage_wait_s +=
        std::chrono::duration<double>{backend_.now() - begin}.count();
  }
  /// @brief Until nothing is in flight, and nothing will be without the visitor.
  void wait_quiet() noexcept {
    loop_.wait_until(
        [](void* context) {
          auto& self = *static_cast<SharedMachine*>(context);
          Guard guard{self.mutex_, self.backend_};
          return self.machine_.idle() && !self.pump_scheduled_;
        },
        this);
  }

 private:
  struct VisitWait {
    SharedMachine* self;
    const PlannedVisit* visit;
  };
  /// @pre the mutex is held.
  void schedule() {
    if (std::exchange(pump_scheduled_, true)) return;
    loop_.post(pump_.run, pump_.context);
  }
  /// After a failure: nothing is in flight any more, and the failed fetches are forgotten.
  void recover() {
    wait_quiet();
    Guard guard{mutex_, backend_};
    machine_.reset_failure();
    if (std::exchange(slots_suspect_, false)) machine_.evict_all();
    failure_.clear();
  }

  Backend& backend_;
  Loop& loop_;
  Pump pump_;

  std::mutex mutex_;  // guards everything below
  Machine machine_;
  Failure failure_;
  FetchInbox inbox_;
  bool pump_scheduled_ = false;
  bool slots_suspect_ = false;  ///< a copy failed on the device after it was issued
};

}  // namespace block_streamer::inline v1
