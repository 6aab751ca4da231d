// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace block_streamer::inline v1 {

/// Closed forms of the fetches per pass or step in steady state, equal blocks, S slots of which
/// `ahead` are on the way. They are what plans are tested against; derivations beside each.

/// @brief The most fetches of one of several repeated forward passes over N blocks: ahead + 1 slots
/// carry what passes through, the rest stays. N - (S - ahead - 1).
[[nodiscard]] constexpr std::uint64_t most_repeated_forward_fetches(std::uint64_t blocks,
                                                                    std::uint64_t slots,
                                                                    std::uint64_t ahead) noexcept {
  return slots >= blocks ? 0 : blocks - (slots - ahead - 1);
}

/// @brief Forward over N blocks and backward over all of them: at each turn the S blocks used last
/// are the first used next. 2 (N - S).
[[nodiscard]] constexpr std::uint64_t training_step_fetches(std::uint64_t blocks,
                                                            std::uint64_t slots) noexcept {
  return slots >= blocks ? 0 : 2 * (blocks - slots);
}

}  // namespace block_streamer::inline v1
