// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>
#include <block_streamer/device/execution_backend.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace block_streamer::inline v1 {

/// @brief The seam between "bytes arrived" and "weights usable": turns a part's wire bytes into the
/// form that the block computes with (another dtype, decompressed). Runs on the compute stream
/// after the bytes are there, into the arena's one bound place; compute is serial, so one place
/// serves all. The wire slot is released right after it. One virtual call a visit.
template <execution_backend Backend>
class Finisher {
 public:
  Finisher() = default;
  Finisher(const Finisher&) = delete;
  Finisher& operator=(const Finisher&) = delete;
  virtual ~Finisher() = default;
  /// @brief Size of the bound form, in bytes; constant over the finisher's life.
  [[nodiscard]] virtual std::uint64_t bound_byte_count(PartId part) const = 0;
  /// @brief Enqueues the work; does not wait for the device.
  virtual void enqueue(PartId part, std::span<const std::byte> wire, std::span<std::byte> bound,
                       typename Backend::Stream& compute) = 0;
};

}  // namespace block_streamer::inline v1
