// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/optim/optimizer_policy.hpp>

namespace block_streamer::inline v1 {

/// Nothing trains: the policy of a Streamer that only infers.
struct NoOptimizer {
  [[nodiscard]] static constexpr GradientDelivery delivery() noexcept {
    return GradientDelivery::never;
  }
  void begin_step(const StepContext&) {}
  void prefetch(BlockId) noexcept {}
  void update(BlockId, std::span<at::Tensor>, std::span<at::Tensor>) {}
  void end_step() {}
};
static_assert(optimizer_policy<NoOptimizer>);

}  // namespace block_streamer::inline v1
