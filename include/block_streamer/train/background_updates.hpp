// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/step_updates.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/io/worker_threads.hpp>
#include <block_streamer/train/background_task.hpp>

#include <ATen/core/Tensor.h>

#include <exception>
#include <optional>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Updates of blocks in host memory on a thread of their own, one at a time and in order,
/// while the visitor is at the next block: an optimizer on the host takes longer than a block's
/// launches, often longer than the device.
/// **Threads.** The visitor's; the thread starts with the first update. **Errors.** What an update
/// throws, wait() throws.
/// **Lifetime.** The destructor waits.
class BackgroundUpdates {
 public:
  BackgroundUpdates() = default;
  BackgroundUpdates(const BackgroundUpdates&) = delete;
  BackgroundUpdates& operator=(const BackgroundUpdates&) = delete;
  ~BackgroundUpdates() { abandon(); }

  /// @brief Waits for the update before this one. The gradients' memory is used until the next
  /// wait().
  /// @throws StorageError if the system refuses the thread.
  void start(StepUpdates& updates, BlockId block, std::vector<at::Tensor> parameters,
             std::vector<at::Tensor> gradients) {
    wait();
    if (!thread_) thread_.emplace(1);
    task_.start(*thread_, [&updates, block, parameters = std::move(parameters),
                           gradients = std::move(gradients)]() mutable {
      updates.update(block, parameters, gradients);
      parameters.clear();
      gradients.clear();
    });
  }
  /// @brief Waits until the last one is done. @throws what it threw.
  void wait() {
    if (const std::exception_ptr error = task_.wait()) std::rethrow_exception(error);
  }
  /// @brief After a failure: what the last one threw is lost.
  void abandon() noexcept { static_cast<void>(task_.wait()); }

 private:
  BackgroundTask task_;
  std::optional<WorkerThreads> thread_;  // joined before the task goes
};

}  // namespace block_streamer::inline v1
