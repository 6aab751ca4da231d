// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/host_backend.hpp>

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace block_streamer_benchmarks {

namespace bs = block_streamer;

/// Slots apart from storage, copied by a worker thread: shows that the program works, not how fast
/// a device is.
class HostSide {
 public:
  using Backend = bs::HostBackend;
  static constexpr bool is_device = false;
  [[nodiscard]] Backend backend() const { return Backend{bs::HostMode::detached}; }
  [[nodiscard]] at::Device device() const { return at::Device{at::kCPU}; }
  void synchronize() {}
  [[nodiscard]] std::uint64_t allocated() const { return 0; }
  [[nodiscard]] std::uint64_t peak() const { return 0; }
  void reset_peak() {}
  [[nodiscard]] std::uint64_t backend_bytes() const { return 0; }

  class Probe {
   public:
    explicit Probe(std::size_t byte_count) : memory_(2 * byte_count) {}
    void copy(std::span<const std::byte> from, std::size_t place) {
      std::memcpy(memory_.data() + place * (memory_.size() / 2), from.data(), from.size());
    }
    void finish() {}

   private:
    std::vector<std::byte> memory_;
  };
  [[nodiscard]] Probe probe(std::size_t byte_count) const { return Probe{byte_count}; }
};

}  // namespace block_streamer_benchmarks
