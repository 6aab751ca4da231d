// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/optim/optimizer_policy.hpp>

namespace block_streamer::inline v1 {

/// The caller trains: gradients land in .grad of parameters(), and any optimizer over those steps
/// them. The policy itself changes nothing.
struct ExternalOptimizer {
  [[nodiscard]] static constexpr GradientDelivery delivery() noexcept {
    return GradientDelivery::by_caller;
  }
  void begin_step(const StepContext&) {}
  void prefetch(BlockId) noexcept {}
  void update(BlockId, std::span<at::Tensor>, std::span<at::Tensor>) {}
  void end_step() {}
};
static_assert(optimizer_policy<ExternalOptimizer>);

}  // namespace block_streamer::inline v1
