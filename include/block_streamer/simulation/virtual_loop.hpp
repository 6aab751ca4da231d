// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/progress_loop.hpp>
#include <block_streamer/simulation/virtual_clock.hpp>

namespace block_streamer::inline v1 {

/// @brief A progress_loop in virtual time: tasks take no time and run before the next event, and
/// waiting lets events happen.
/// **Threads.** One. **Lifetime.** The clock's.
class VirtualLoop {
 public:
  explicit VirtualLoop(VirtualClock& clock) : clock_{&clock} {}

  void post(void (*task)(void*) noexcept, void* context) {
    clock_->soon([task, context] { task(context); });
  }
  /// @throws ContractViolation if nothing is left to happen and `done` is still false.
  void wait_until(bool (*done)(void*), void* context) {
    clock_->run_until([done, context] { return done(context); });
  }

 private:
  VirtualClock* clock_;
};
static_assert(progress_loop<VirtualLoop>);

}  // namespace block_streamer::inline v1
