// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/device/execution_backend.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief All device memory for weights: the slots, one after another, and one bound place for a
/// finisher, in one allocation. What is not in here does not exist, so the bound on resident blocks
/// holds by construction and no wait enforces it. Addresses are stable.
template <execution_backend Backend>
class Arena {
 public:
  /// @param slot_byte_counts  of each slot.
  /// @throws DeviceError if the device has not so much memory.
  Arena(Backend& backend, std::span<const std::uint64_t> slot_byte_counts,
        std::uint64_t bound_byte_count)
      : slots_{lay_out(slot_byte_counts)},
        bound_{slots_.empty() ? 0 : round_up(slots_.back().end(), tensor_alignment),
               bound_byte_count},
        buffer_{allocate(backend)},
        bytes_{backend.bytes(buffer_)} {}

  [[nodiscard]] std::uint32_t slot_count() const noexcept {
    return static_cast<std::uint32_t>(slots_.size());
  }
  [[nodiscard]] std::uint64_t byte_count() const noexcept { return bytes_.size(); }
  [[nodiscard]] std::span<std::byte> slot(std::uint32_t index) const noexcept {
    return at(slots_[index]);
  }
  /// @brief Where a finisher puts the bound form of the block that computes now.
  [[nodiscard]] std::span<std::byte> bound() const noexcept { return at(bound_); }

 private:
  static std::vector<ByteRange> lay_out(std::span<const std::uint64_t> byte_counts) {
    std::vector<ByteRange> slots;
    std::uint64_t begin = 0;
    for (const std::uint64_t byte_count : byte_counts) {
      slots.push_back({begin, byte_count});
      begin = round_up(begin + byte_count, tensor_alignment);
    }
    return slots;
  }
  [[nodiscard]] std::span<std::byte> at(ByteRange range) const noexcept {
    return bytes_.subspan(static_cast<std::size_t>(range.offset),
                          static_cast<std::size_t>(range.byte_count));
  }
  [[nodiscard]] typename Backend::DeviceBuffer allocate(Backend& backend) const {
    try {
      return backend.allocate_device(static_cast<std::size_t>(bound_.end()));
    } catch (const DeviceError& error) {
      throw DeviceError{
          std::string{error.what()} + ", for " + std::to_string(slots_.size()) +
              " slots of blocks: a smaller prefetch_ahead or device_budget takes less",
          error.native_code(), error.sticky()};
    }
  }

  std::vector<ByteRange> slots_;
  ByteRange bound_;
  typename Backend::DeviceBuffer buffer_;
  std::span<std::byte> bytes_;
};

}  // namespace block_streamer::inline v1
