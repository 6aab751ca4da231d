// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/step_updates.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/optim/optimizer_policy.hpp>

#include <ATen/core/Tensor.h>

#include <span>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Holds the policy itself.
template <optimizer_policy Optimizer>
class PolicySeat final : public StepUpdates {
 public:
  explicit PolicySeat(Optimizer optimizer) : policy{std::move(optimizer)} {}

  void begin_step(const StepContext& context) {
    expects(!open_, "begin_step before end_step of the last step");
    policy.begin_step(context);
    open_ = true;
    consumed_ = false;
  }
  void end_step() {
    expects(open_, "end_step without begin_step");
    open_ = false;
    policy.end_step();
  }
  void update(BlockId block, std::span<at::Tensor> parameters,
              std::span<at::Tensor> gradients) override {
    policy.update(block, parameters, gradients);
  }

  [[nodiscard]] bool any_thread() const noexcept override {
    return updates_on_any_thread<Optimizer>;
  }

  Optimizer policy;
};

}  // namespace block_streamer::inline v1
