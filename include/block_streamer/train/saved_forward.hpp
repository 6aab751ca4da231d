// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/autocast_state.hpp>
#include <block_streamer/train/rng_replay.hpp>
#include <block_streamer/train/saved_context.hpp>
#include <block_streamer/train/saved_input.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace block_streamer::inline v1 {

/// What a backward needs of one visit of the forward; nothing, where it does not come down to.
struct SavedVisit {
  SavedInput input;
  std::optional<RngState> random;
  std::uint64_t mode = 0;  ///< of the block, @see moded_block
};

/// @brief What a backward needs of a forward.
/// **Lifetime.** The graph node's, until its backward frees it.
template <class Context>
struct SavedForward {
  std::vector<SavedContext<Context>> contexts;  ///< per micro-batch
  std::vector<bool> inputs_needed;  ///< per micro-batch: the list's input needs a gradient
  AutocastState autocast;           ///< of the forward: a backward's thread casts otherwise
  /// Visit by visit and in a visit by micro-batch.
  std::vector<SavedVisit> visits{};

  /// @brief The backward of that micro-batch goes down to the first block, whatever trains.
  [[nodiscard]] bool reaches_first(std::size_t batch) const {
    return inputs_needed[batch] || contexts[batch].any_needed();
  }
  [[nodiscard]] bool any_reaches_first() const {
    for (std::size_t b = 0; b < contexts.size(); ++b) {
      if (reaches_first(b)) return true;
    }
    return false;
  }
};

}  // namespace block_streamer::inline v1
