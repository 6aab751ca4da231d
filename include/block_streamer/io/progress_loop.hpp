// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

namespace block_streamer::inline v1 {

/// @brief The seam that lets the same pipeline run on a thread or on a virtual clock.
/// - `post(task, context)`: queues `task(context)` for the loop's one thread (or virtual time);
/// from any thread; tasks run in
///   the order of their posts and never throw.
/// - `wait_until(done, context)`: returns when `done(context)` is true. Called by the visiting
/// thread only. `done` takes the
///   locks it needs itself and is evaluated again after every task that ran.
template <class L>
concept progress_loop = requires(L& loop, void (*task)(void*) noexcept, bool (*done)(void*),
                                 void* context) {
  { loop.post(task, context) } -> std::same_as<void>;
  { loop.wait_until(done, context) } -> std::same_as<void>;
};

}  // namespace block_streamer::inline v1
