// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/chunked_loss.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/core/Tensor.h>

namespace block_streamer::inline v1 {

/// @brief What left the last block, scored by a model's norm and head in chunks of tokens.
/// @param hidden  (B,T,C). @see chunked_token_loss
template <class Model>
[[nodiscard]] TokenLoss loss_over_tokens(const Model& model, const at::Tensor& hidden,
                                         const TokenTargets& targets,
                                         const ChunkedLossOptions& options = {}) {
  const auto logits_of = [&model](const at::Tensor& some) { return model.logits(some); };
  return chunked_token_loss(logits_of, hidden, targets, model.config().vocabulary_size, options);
}

}  // namespace block_streamer::inline v1
