// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <cstdint>

namespace block_streamer::inline v1 {

/// Marks a position that no token is scored at.
inline constexpr std::int64_t unscored = -100;

/// What each position must predict.
struct TokenTargets {
  at::Tensor targets;       ///< (B, T) int64 on the CPU: the next token's id, or `unscored`
  std::uint64_t count = 0;  ///< how many positions are scored
};

/// The loss of one micro-batch, to be divided by the count of the whole step.
struct TokenLoss {
  at::Tensor sum;           ///< scalar, fp32, differentiable: nats over all scored positions
  std::uint64_t count = 0;  ///< how many those were
};

/// @brief Shifts by one: position t is scored iff token t + 1 is trained. The last position of a
/// row and a row's first token are never scored.
/// @param ids  (B, T) int64, CPU. @param trained  (B, T) bool, CPU: tokens that the loss is about.
[[nodiscard]] inline TokenTargets token_targets(const at::Tensor& ids, const at::Tensor& trained) {
  expects(ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.is_cpu(),
          "token ids are (B, T) int64 on the CPU");
  expects(trained.sizes() == ids.sizes() && trained.scalar_type() == at::kBool && trained.is_cpu(),
          "the trained mask is (B, T) bool on the CPU");
  const std::int64_t tokens = ids.size(1);
  expects(tokens >= 1, "a row has at least one token");
  const at::Tensor next = at::where(trained.narrow(1, 1, tokens - 1), ids.narrow(1, 1, tokens - 1),
                                    unscored);  // (B, T-1)
  const at::Tensor last = at::full({ids.size(0), 1}, unscored, ids.options());
  TokenTargets result{.targets = at::cat({next, last}, 1)};  // (B, T)
  result.count = static_cast<std::uint64_t>(result.targets.ne(unscored).sum().item<std::int64_t>());
  return result;
}

/// @brief The scored positions alone, where the loss is computed: what a recorded step's loss
/// takes, since its shape says how much there is to do.
struct ScoredTokens {
  at::Tensor positions;  ///< (S) int64, in B·T
  at::Tensor wanted;     ///< (S) int64, token ids
};

/// @brief Picks them. @param targets  on the CPU. **Cost.** Two copies to the device.
[[nodiscard]] inline ScoredTokens scored_tokens(const TokenTargets& targets, at::Device device) {
  const at::Tensor flat = targets.targets.flatten();                       // (B·T)
  const at::Tensor positions = at::nonzero(flat.ne(unscored)).squeeze(1);  // (S)
  return {positions.to(device), flat.index_select(0, positions).to(device)};
}

/// @brief Sum of cross-entropies at the scored positions, in fp32 whatever the logits' dtype.
/// The loss of a step is Σ sums / Σ counts over its micro-batches, whatever the split; to
/// accumulate, call (sum / step_count).backward() for each.
/// @param logits  (B, T, V), any float dtype and device.
/// **Cost.** Log-probabilities (B, T, V) in fp32 are saved for backward, which makes another such
/// tensor; an fp32 copy of the logits comes on top where they are not fp32. No copy to shift them.
[[nodiscard]] inline TokenLoss token_loss(const at::Tensor& logits, const TokenTargets& targets) {
  expects(logits.dim() == 3 && logits.size(0) == targets.targets.size(0) &&
              logits.size(1) == targets.targets.size(1),
          "logits are (B, T, V) beside targets (B, T)");
  const at::Tensor rows = logits.flatten(0, 1).to(at::kFloat);              // (B·T, V)
  const at::Tensor wanted = targets.targets.flatten().to(logits.device());  // (B·T)
  return {.sum = at::cross_entropy_loss(rows, wanted, {}, at::Reduction::Sum, unscored),
          .count = targets.count};
}

/// @brief The same from ids and the trained mask.
[[nodiscard]] inline TokenLoss token_loss(const at::Tensor& logits, const at::Tensor& ids,
                                          const at::Tensor& trained) {
  return token_loss(logits, token_targets(ids, trained));
}

/// Running total of an evaluation: mean nats per scored token over everything added.
class LossTotal {
 public:
  /// **Cost.** One host wait for the sum.
  void add(const TokenLoss& loss) {
    nats_ += loss.sum.item<double>();
    count_ += loss.count;
  }
  [[nodiscard]] double nats() const noexcept { return nats_; }
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  /// @pre count() > 0.
  [[nodiscard]] double mean() const {
    expects(count_ > 0, "no token was scored");
    return nats_ / static_cast<double>(count_);
  }

 private:
  double nats_ = 0;
  std::uint64_t count_ = 0;
};

}  // namespace block_streamer::inline v1
