// SPDX-License-Identifier: Apache-2.0
// What memory the jobs of a loaded model were expected to take.
#pragma once

#include "measured_memory.hpp"
#include "memory_report.hpp"

#include <block_streamer/pipeline/activation_options.hpp>
#include <block_streamer/pipeline/transfers.hpp>
#include <block_streamer/plan/memory_forecast.hpp>

#include <optional>

namespace block_streamer_cli {

class ExpectedMemory {
 public:
  /// What of a forecast follows from the model and its options, whatever runs.
  block_streamer::MemoryForecast standing{};
  /// The inputs of blocks leave the device in training.
  bool offloads_inputs = false;

  /// @brief Of several jobs the largest counts.
  void expect(const block_streamer::MemoryForecast& forecast) {
    if (!largest_ || largest_->device() < forecast.device()) largest_ = forecast;
  }
  /// @brief Puts what was expected beside what was measured.
  void add_to(MemoryReport& report, bool device_is_host) const {
    if (!largest_) return;
    if (largest_->program > 0) report.rss.predicted = largest_->host(device_is_host);
    if (report.device) report.device->predicted = largest_->device();
    if (report.page_locked) report.page_locked->predicted = largest_->page_locked();
  }

 private:
  std::optional<block_streamer::MemoryForecast> largest_;  ///< nullopt: nothing was expected
};

/// @brief Activations that are kept where the device does not see them.
[[nodiscard]] inline bool leave_the_device(const block_streamer::ActivationOptions& activations,
                                           bool device_is_host) {
  return activations.place == block_streamer::ActivationPlace::file ||
         (activations.place == block_streamer::ActivationPlace::ram && !device_is_host);
}

/// @brief Slots, places of conversions and staging.
inline void add_pipeline(block_streamer::MemoryForecast& forecast,
                         const block_streamer::TransferShape& shape) {
  forecast.slots += shape.bound_byte_count;
  for (const std::uint64_t slot : shape.slot_byte_counts) forecast.slots += slot;
  forecast.staging += shape.chunk_byte_count * shape.ticket_count;
}

}  // namespace block_streamer_cli
