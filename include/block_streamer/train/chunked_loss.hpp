// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/train/graph_leaves.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// How much of the logits a loss may hold at once.
struct ChunkedLossOptions {
  /// Of a chunk's logits in fp32; at least one position is taken. Up to two more such tensors in
  /// the model's type are alive beside it.
  std::uint64_t logits_byte_count = std::uint64_t{128} << 20;
};

namespace detail {

/// The gradient is known when the loss is: what is left is to scale it.
class ChunkedLossNode final : public torch::autograd::Node {
 public:
  ChunkedLossNode(torch::autograd::edge_list edges, std::vector<at::Tensor> gradients)
      : Node{std::move(edges)}, gradients_{std::move(gradients)} {}

  [[nodiscard]] std::string name() const override { return "ChunkedLossBackward"; }
  void release_variables() override { gradients_.clear(); }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& outputs) override {
    expects(!c10::GradMode::is_enabled(),
            "a chunked loss has no second derivative (create_graph=true)");
    expects(!gradients_.empty(),
            "this loss's backward has run and freed what it saved; keep it with retain_graph=true");
    torch::autograd::variable_list result;
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      result.push_back(outputs.at(0).defined() && task_should_compute_output(i)
                           ? gradients_[i].mul(outputs[0])
                           : at::Tensor{});
    }
    return result;
  }

 private:
  std::vector<at::Tensor> gradients_;  ///< of the sum, in the order of the edges
};

/// Sum of cross-entropies of a chunk; its logits become their own gradient in place.
/// @param logits  (R,V), fp32, overwritten. @param wanted  (R), on the same device.
[[nodiscard]] inline at::Tensor cross_entropy_in_place(const at::Tensor& logits,
                                                       const at::Tensor& wanted) {
  const at::Tensor column = wanted.unsqueeze(1);       // (R,1)
  logits.sub_(at::amax(logits, 1, /*keepdim=*/true));  // no exponential overflows
  const at::Tensor picked = logits.gather(1, column);  // (R,1)
  const at::Tensor total = logits.exp_().sum(1, /*keepdim=*/true);
  at::Tensor loss = total.log().sub_(picked).sum();
  logits.div_(total);
  logits.scatter_(1, column, logits.gather(1, column).sub_(1));
  return loss;
}

/// One loss over the scored positions, chunk by chunk.
template <class Logits>
class ChunkedLoss {
 public:
  ChunkedLoss(const Logits& logits_of, const at::Tensor& hidden, const ScoredTokens& scored,
              std::int64_t rows_a_chunk)
      : logits_of_{logits_of},
        hidden_{hidden.detach().flatten(0, 1)},
        positions_{scored.positions},
        wanted_{scored.wanted},
        rows_a_chunk_{rows_a_chunk},
        wants_{c10::GradMode::is_enabled()},
        input_wants_{hidden.requires_grad()} {
    sum_ = at::zeros({}, hidden.options().dtype(at::kDouble).requires_grad(false));
  }

  [[nodiscard]] at::Tensor run(const at::Tensor& input) {
    const c10::NoGradGuard no_grad;
    const std::int64_t count = positions_.size(0);
    for (std::int64_t begin = 0; begin < count; begin += rows_a_chunk_)
      add(begin, std::min(rows_a_chunk_, count - begin));
    at::Tensor sum = sum_.to(at::kFloat);
    if (count == 0 && wants_ && input.requires_grad())
      gradients_.push_back(at::zeros_like(hidden_));
    if (gradients_.empty()) return sum;
    std::vector<at::Tensor> inputs{input};
    inputs.insert(inputs.end(), leaves_.begin(), leaves_.end());
    gradients_[0] = gradients_[0].view(input.sizes());
    for (std::size_t i = 1; i < gradients_.size(); ++i)
      gradients_[i] = gradients_[i].to(leaves_[i - 1].scalar_type());
    const std::shared_ptr<torch::autograd::Node> node{
        new ChunkedLossNode{torch::autograd::collect_next_edges(inputs), std::move(gradients_)},
        torch::autograd::deleteNode};
    torch::autograd::set_history(sum, node);
    return sum;
  }

 private:
  void add(std::int64_t begin, std::int64_t rows) {
    const at::Tensor at_rows = positions_.narrow(0, begin, rows);
    at::Tensor chunk = hidden_.index_select(0, at_rows);  // (R,C)
    at::Tensor logits;                                    // (R,V)
    {
      const c10::AutoGradMode grad{wants_};
      chunk.set_requires_grad(wants_);
      logits = logits_of_(chunk.unsqueeze(0)).squeeze(0);
    }
    const at::Tensor values = logits.detach().to(at::kFloat);
    sum_.add_(cross_entropy_in_place(values, wanted_.narrow(0, begin, rows)));
    if (!wants_) return;
    if (gradients_.empty() && !begin_gradients(logits, chunk)) return;
    std::vector<at::Tensor> inputs{chunk};
    inputs.insert(inputs.end(), leaves_.begin(), leaves_.end());
    const auto own = torch::autograd::grad({logits}, inputs, {values.to(logits.scalar_type())});
    gradients_[0].index_copy_(0, at_rows, own[0]);
    for (std::size_t i = 1; i < own.size(); ++i) gradients_[i].add_(own[i]);
  }
  /// @returns false if nothing on the way to the loss wants a gradient.
  [[nodiscard]] bool begin_gradients(const at::Tensor& logits, const at::Tensor& chunk) {
    leaves_ = leaves_behind(logits, chunk);
    wants_ = input_wants_ || !leaves_.empty();
    if (!wants_) return false;
    gradients_.push_back(at::zeros_like(hidden_));
    for (const at::Tensor& leaf : leaves_) {  // sums over many chunks: not in a half type
      const auto type = c10::promoteTypes(leaf.scalar_type(), at::kFloat);
      gradients_.push_back(at::zeros_like(leaf, leaf.options().dtype(type)));
    }
    return true;
  }

  const Logits& logits_of_;
  at::Tensor hidden_;     ///< (B·T,C), without its history
  at::Tensor positions_;  ///< (S), rows of it that are scored
  at::Tensor wanted_;     ///< (S), token ids
  at::Tensor sum_;
  std::int64_t rows_a_chunk_;
  bool wants_;                         ///< gradients are to be taken with the chunks
  bool input_wants_;                   ///< hidden has a history
  std::vector<at::Tensor> leaves_;     ///< that the way from hidden to logits trains
  std::vector<at::Tensor> gradients_;  ///< of hidden, then of the leaves
};

}  // namespace detail

/// @brief token_loss() without the logits of all tokens: final norm, head and cross-entropy go over
/// the scored positions in chunks, and the gradient to `hidden` is taken with each chunk, so
/// neither pass ever holds tokens × vocabulary numbers. Positions that are not scored cost nothing.
/// Use it wherever a loss is wanted and the logits are not.
/// Where hidden is fp32 it differs from token_loss() by the order of the sums alone (some 1e-7 of
/// the value); in a half type the gradient is rounded once more, after it is scaled.
/// @param logits_of  (1,R,C) to (1,R,V): what stands between the last block and the loss, position
/// by position. Leaves in it that require a gradient get theirs, summed over the chunks in fp32.
/// @param hidden  (B,T,C), any float type and device, what left the last block.
/// @param vocabulary  V, which says how many positions make a chunk.
/// @returns the sum in fp32; differentiable where gradients are enabled.
/// **Cost.** One fp32 logits chunk, and in training beside it the logits and their gradient in the
/// model's type; in training (B,T,C) for the gradient.
template <class Logits>
[[nodiscard]] TokenLoss chunked_token_loss(const Logits& logits_of, const at::Tensor& hidden,
                                           const ScoredTokens& scored, std::uint64_t vocabulary,
                                           const ChunkedLossOptions& options = {}) {
  expects(vocabulary > 0, "there is a vocabulary");
  expects(hidden.dim() == 3 && scored.positions.device() == hidden.device() &&
              scored.wanted.device() == hidden.device() &&
              scored.positions.sizes() == scored.wanted.sizes(),
          "hidden is (B, T, C) beside positions and tokens (S) on its device");
  const auto rows = std::max<std::uint64_t>(1, options.logits_byte_count / 4 / vocabulary);
  detail::ChunkedLoss loss{logits_of, hidden, scored, static_cast<std::int64_t>(rows)};
  return {.sum = loss.run(hidden), .count = static_cast<std::uint64_t>(scored.positions.size(0))};
}

/// @brief The same from targets of all positions.
template <class Logits>
[[nodiscard]] TokenLoss chunked_token_loss(const Logits& logits_of, const at::Tensor& hidden,
                                           const TokenTargets& targets, std::uint64_t vocabulary,
                                           const ChunkedLossOptions& options = {}) {
  expects(hidden.dim() == 3 && hidden.size(0) == targets.targets.size(0) &&
              hidden.size(1) == targets.targets.size(1),
          "hidden is (B, T, C) beside targets (B, T)");
  TokenLoss loss = chunked_token_loss(logits_of, hidden, scored_tokens(targets, hidden.device()),
                                      vocabulary, options);
  loss.count = targets.count;
  return loss;
}

}  // namespace block_streamer::inline v1
