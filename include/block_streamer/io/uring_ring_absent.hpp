// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/ring_read.hpp>
#include <block_streamer/io/uring_options.hpp>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <span>
#include <system_error>

namespace block_streamer::inline v1 {

/// @brief Stands for the ring in programs that were built without liburing: it never opens.
class UringRing {
 public:
  [[nodiscard]] static std::unique_ptr<UringRing> open(const UringOptions&, UringReport& report) {
    report.refusal =
        "this program was built without liburing (Debian, Ubuntu: liburing-dev; then configure "
        "again)";
    return nullptr;
  }

  bool push(const RingRead&) noexcept { return false; }
  int submit_and_wait() noexcept { return -ENOSYS; }
  template <class Take>
  void take_back(Take&&) noexcept {}
  void pause() noexcept {}
  template <class Take>
  void reap(Take&&) noexcept {}
  void wake() noexcept {}
  std::error_code add_buffer(std::uint32_t, std::span<std::byte>) noexcept {
    return std::make_error_code(std::errc::function_not_supported);
  }
  void remove_buffer(std::uint32_t) noexcept {}
};
static_assert(read_ring<UringRing>);

}  // namespace block_streamer::inline v1
