// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace block_streamer::inline v1 {

/// What the inputs of blocks that wait for a backward take, in bytes.
struct ActivationUsage {
  std::uint64_t device_bytes = 0;  ///< held on the device now: those kept, leaving and returning
  std::uint64_t peak_device_bytes = 0;
  std::uint64_t host_bytes = 0;  ///< host memory taken for them, in use or not
  std::uint64_t file_bytes = 0;  ///< size that their file has reached
  std::uint64_t bytes_out = 0;   ///< that left the device, since the streamer was made
  std::uint64_t bytes_in = 0;    ///< that returned
};

/// @brief Keeps an ActivationUsage. **Threads.** Any: graphs are dropped anywhere.
class ActivationMeter {
 public:
  /// Bytes on the device that count as held while it lives.
  class Share {
   public:
    Share() noexcept = default;
    Share(std::shared_ptr<ActivationMeter> meter, std::uint64_t byte_count)
        : meter_{std::move(meter)}, byte_count_{byte_count} {
      meter_->change([&](ActivationUsage& usage) {
        usage.device_bytes += byte_count_;
        usage.peak_device_bytes = std::max(usage.peak_device_bytes, usage.device_bytes);
      });
    }
    Share(Share&& other) noexcept { swap(other); }
    Share& operator=(Share&& other) noexcept {
      Share{std::move(other)}.swap(*this);
      return *this;
    }
    ~Share() {
      if (meter_)
        meter_->change([&](ActivationUsage& usage) { usage.device_bytes -= byte_count_; });
    }

   private:
    void swap(Share& other) noexcept {
      std::swap(meter_, other.meter_);
      std::swap(byte_count_, other.byte_count_);
    }
    std::shared_ptr<ActivationMeter> meter_;  // shared: a graph may outlive the streamer
    std::uint64_t byte_count_ = 0;
  };

  template <class Change>
  void change(Change&& change) {
    const std::lock_guard lock{mutex_};
    change(usage_);
  }
  [[nodiscard]] ActivationUsage usage() const {
    const std::lock_guard lock{mutex_};
    return usage_;
  }

 private:
  mutable std::mutex mutex_;
  ActivationUsage usage_;
};

}  // namespace block_streamer::inline v1
