// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <cstdint>

namespace block_streamer::inline v1 {

/// How a mapping will be touched, as the system is told: it reads around faults accordingly.
enum class MappingAdvice : std::uint8_t { normal, sequential, random };

}  // namespace block_streamer::inline v1
