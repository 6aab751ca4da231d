// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/os/huge_pages.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace block_streamer::inline v1 {

/// @brief The page-locked chunks between storage and device: one region, equal chunks,
/// page-aligned. Where the system refuses to page-lock, the chunks work all the same, slower.
template <execution_backend Backend>
class StagingRing {
 public:
  /// @throws StorageError or DeviceError if the memory cannot be had.
  StagingRing(Backend& backend, std::uint32_t chunk_count, std::uint64_t chunk_byte_count)
      : stride_{round_up(chunk_byte_count, page)},
        pages_{stride_ * chunk_count},
        bytes_{pages_.bytes()} {
    if (!bytes_.empty()) registration_ = backend.register_host(bytes_);
  }

  [[nodiscard]] std::span<std::byte> chunk(std::uint32_t index) const noexcept {
    return bytes_.subspan(stride_ * index, stride_);
  }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t byte_count() const noexcept { return bytes_.size(); }
  [[nodiscard]] bool page_locked() const noexcept { return registration_.has_value(); }

 private:
  static constexpr std::uint64_t page = 4096;
  std::uint64_t stride_;
  HugePages pages_;
  std::span<std::byte> bytes_;
  std::optional<typename Backend::HostRegistration> registration_;  // released before the pages
};

}  // namespace block_streamer::inline v1
