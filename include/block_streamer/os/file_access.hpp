// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <cstdint>
#include <string>

namespace block_streamer::inline v1 {

/// Through the system's file cache, or past it (O_DIRECT, FILE_FLAG_NO_BUFFERING).
enum class FileAccess : std::uint8_t { cached, direct };

/// What an attempt to read a file past the system's cache came to.
struct DirectIo {
  std::uint32_t alignment = 1;  ///< of offsets, lengths and addresses; 1 where it is refused
  std::string refusal;          ///< why it is refused; empty where it works
  [[nodiscard]] bool works() const noexcept { return refusal.empty(); }
};

}  // namespace block_streamer::inline v1
