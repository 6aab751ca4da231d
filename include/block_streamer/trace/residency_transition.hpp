// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>

#include <cstdint>
#include <string_view>

namespace block_streamer::inline v1 {

/// What a device slot holds. `empty`: nothing. `fetching`: reads or copies into it may be in
/// flight. `resident`: its part's bytes are there, in the order of the device. `leased`: a visit
/// uses it. `released`: the visit has issued its last use; the bytes stay until the slot is
/// refilled.
enum class Residency : std::uint8_t { empty, fetching, resident, leased, released };

/// @brief How messages and traces spell a state.
[[nodiscard]] constexpr std::string_view name_of(Residency state) noexcept {
  switch (state) {
    case Residency::empty:
      return "empty";
    case Residency::fetching:
      return "fetching";
    case Residency::resident:
      return "resident";
    case Residency::leased:
      return "leased";
    case Residency::released:
      return "released";
  }
  return "unknown";
}

/// One change of one slot, numbered in the order in which the changes were issued.
struct Transition {
  std::uint64_t sequence = 0;  ///< counts from 0 over the life of the pipeline, without gaps
  PartId part{};               ///< the part that enters, uses or leaves the slot
  Residency from = Residency::empty;
  Residency to = Residency::empty;
  std::uint32_t slot = 0;
  std::uint64_t epoch = 0;  ///< the pass that issued the change
  friend bool operator==(const Transition&, const Transition&) = default;
};

}  // namespace block_streamer::inline v1
