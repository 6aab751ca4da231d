// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <cmath>
#include <cstdint>
#include <numbers>

namespace block_streamer::inline v1 {

/// How a learning rate moves after the warm-up.
enum class ScheduleShape : std::uint8_t { constant, linear, cosine };

/// Learning rate over a run: rises linearly over the warm-up, then stays, or falls to 0 at the end.
struct Schedule {
  ScheduleShape shape = ScheduleShape::constant;
  double peak = 2e-4;
  std::uint64_t warmup_steps = 0;
  std::uint64_t total_steps = 0;  ///< used by linear and cosine
};

/// @brief The learning rate of a step, a pure function of its number: nothing to save or restore.
/// Equal to the schedules of `transformers` at its 0-based step `step - 1`: the first of w warm-up
/// steps has rate 0, step w + 1 has the peak.
/// @param step  1-based.
[[nodiscard]] inline double learning_rate_at(const Schedule& schedule, std::uint64_t step) {
  expects(step >= 1, "steps count from 1");
  const std::uint64_t done = step - 1;
  if (done < schedule.warmup_steps)
    return schedule.peak * static_cast<double>(done) / static_cast<double>(schedule.warmup_steps);
  if (schedule.shape == ScheduleShape::constant) return schedule.peak;
  if (done >= schedule.total_steps) return 0;
  const double progress = static_cast<double>(done - schedule.warmup_steps) /
                          static_cast<double>(schedule.total_steps - schedule.warmup_steps);
  if (schedule.shape == ScheduleShape::linear) return schedule.peak * (1 - progress);
  return schedule.peak * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

}  // namespace block_streamer::inline v1
