// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace block_streamer::inline v1 {

/// @brief When a run saves its state: every so many steps, or else whenever so much time has passed
/// since the last time.
class SaveSchedule {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param every_steps  nullopt: by time.
  SaveSchedule(std::optional<std::uint64_t> every_steps, Clock::duration interval,
               Clock::time_point begin)
      : every_steps_{every_steps}, interval_{interval}, last_{begin} {}

  /// @brief True if it is to be saved after this step.
  [[nodiscard]] bool is_due(std::uint64_t step, Clock::time_point now) const {
    return every_steps_ ? step % *every_steps_ == 0 : now - last_ >= interval_;
  }
  /// @param now  after saving, so that slow disks do not eat the run.
  void saved(Clock::time_point now) noexcept { last_ = now; }

 private:
  std::optional<std::uint64_t> every_steps_;
  Clock::duration interval_;
  Clock::time_point last_;
};

}  // namespace block_streamer::inline v1
