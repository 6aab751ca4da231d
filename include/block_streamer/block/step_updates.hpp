// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <ATen/core/Tensor.h>

#include <span>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief An optimizer policy as a backward sees it: erased, one virtual call a block. Shared by
/// the streamer and the graphs that it made.
/// **Threads.** Externally synchronised.
class StepUpdates {
 public:
  StepUpdates() = default;
  StepUpdates(const StepUpdates&) = delete;
  StepUpdates& operator=(const StepUpdates&) = delete;
  virtual ~StepUpdates() = default;
  /// @brief A step is open, so a backward consumes its gradients.
  [[nodiscard]] bool open() const noexcept { return open_; }
  /// @brief A backward begins to. @throws ContractViolation if one did before in this step.
  void begin_backward() {
    expects(!std::exchange(consumed_, true),
            "a step takes one backward: to accumulate several, run them outside of begin_step … "
            "end_step and call step() after the last");
  }
  virtual void update(BlockId block, std::span<at::Tensor> parameters,
                      std::span<at::Tensor> gradients) = 0;
  /// @brief update() may run on another thread than the visitor's. @see updates_on_any_thread
  [[nodiscard]] virtual bool any_thread() const noexcept { return false; }

 protected:
  bool open_ = false;
  bool consumed_ = false;
};

}  // namespace block_streamer::inline v1
