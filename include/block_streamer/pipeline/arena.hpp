// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/config.hpp>
#include <block_streamer/device/execution_backend.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief All device memory for weights: equal slots and one bound place for a finisher, in one
/// allocation. What is not in here does not exist, so the bound on resident blocks holds by
/// construction and no wait enforces it. Addresses are stable.
template <execution_backend Backend>
class Arena {
 public:
  /// @throws DeviceError if the device has not so much memory.
  Arena(Backend& backend, std::uint32_t slot_count, std::uint64_t slot_byte_count,
        std::uint64_t bound_byte_count)
      : stride_{round_up(slot_byte_count, tensor_alignment)},
        slot_byte_count_{slot_byte_count},
        slot_count_{slot_count},
        bound_byte_count_{bound_byte_count},
        buffer_{backend.allocate_device(stride_ * slot_count + bound_byte_count)},
        bytes_{backend.bytes(buffer_)} {}

  [[nodiscard]] std::uint32_t slot_count() const noexcept { return slot_count_; }
  [[nodiscard]] std::uint64_t byte_count() const noexcept { return bytes_.size(); }
  [[nodiscard]] std::span<std::byte> slot(std::uint32_t index) const noexcept {
    return bytes_.subspan(stride_ * index, slot_byte_count_);
  }
  /// @brief Where a finisher puts the bound form of the block that computes now.
  [[nodiscard]] std::span<std::byte> bound() const noexcept {
    return bytes_.subspan(stride_ * slot_count_, bound_byte_count_);
  }

 private:
  std::uint64_t stride_;
  std::uint64_t slot_byte_count_;
  std::uint32_t slot_count_;
  std::uint64_t bound_byte_count_;
  typename Backend::DeviceBuffer buffer_;
  std::span<std::byte> bytes_;
};

}  // namespace block_streamer::inline v1
