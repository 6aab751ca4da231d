// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/chunked_loss.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

namespace block_streamer::inline v1 {

/// @brief What left the last block, scored by a model's norm and head in chunks of tokens; in one
/// chunk where the head is streamed, since each would fetch it again.
/// @param hidden  (B,T,C). @see chunked_token_loss
/// @param targets  TokenTargets or ScoredTokens.
template <class Model, class Targets>
[[nodiscard]] TokenLoss loss_over_tokens(const Model& model, const at::Tensor& hidden,
                                         const Targets& targets, ChunkedLossOptions options = {}) {
  if (!model.head_is_resident())
    options.logits_byte_count = std::numeric_limits<std::uint64_t>::max();
  const auto logits_of = [&model](const at::Tensor& some) { return model.logits(some); };
  return chunked_token_loss(logits_of, hidden, targets, model.config().vocabulary_size, options);
}

}  // namespace block_streamer::inline v1
