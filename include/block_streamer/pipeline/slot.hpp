// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>
#include <block_streamer/trace/residency_transition.hpp>

#include <cstdint>
#include <optional>

namespace block_streamer::inline v1 {

/// One place in the arena and what is in it. A state machine: only `may_follow` moves are made.
struct Slot {
  std::optional<PartId> part;
  Residency state = Residency::empty;
  std::uint64_t byte_count = 0;     ///< slot bytes of the part
  std::uint64_t release_epoch = 0;  ///< the pass of the latest release; 0: never released
};

/// @brief The moves that a slot may make.
[[nodiscard]] constexpr bool may_follow(Residency from, Residency to) noexcept {
  switch (to) {
    case Residency::empty:
      return from != Residency::leased;
    case Residency::fetching:
      return from != Residency::leased && from != Residency::fetching;
    case Residency::resident:
      return from == Residency::fetching;
    case Residency::leased:
      return from == Residency::resident || from == Residency::released;
    case Residency::released:
      return from == Residency::leased;
  }
  return false;
}

}  // namespace block_streamer::inline v1
