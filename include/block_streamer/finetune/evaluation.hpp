// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/finetune/loss_over_tokens.hpp>
#include <block_streamer/finetune/row_batch.hpp>
#include <block_streamer/models/non_finite.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// What an evaluation has seen.
struct Evaluation {
  double mean_loss = 0;      ///< nats per scored token
  std::uint64_t scored = 0;  ///< tokens whose probability counted
  std::uint64_t tokens = 0;  ///< tokens that went through the model
};

namespace detail {
/// Evaluation mode until destroyed, exceptions included.
template <class Streamer>
class EvaluationMode {
 public:
  explicit EvaluationMode(Streamer& streamer)
      : streamer_{streamer}, was_training_{streamer.is_training()} {
    streamer.eval();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;
  ~EvaluationMode() { streamer_.train(was_training_); }

 private:
  Streamer& streamer_;
  bool was_training_;
};
}  // namespace detail

/// @brief Mean loss over rows, in evaluation mode (left again on every path): −ln p of every
/// trained token given those before it in its row, summed and divided by their number. A row's
/// first token is never scored.
/// @param batch      rows that share a pass.
/// @param after_each called with the rows done so far; return false to stop early.
/// @param forward    `(hidden, context)`, in place of the streamer's: a CapturedForward's, say.
/// @pre some token is scored. @throws NotFiniteError naming the block where the first value appears
/// that is not finite.
template <class Model, class Streamer, class Forward>
[[nodiscard]] Evaluation evaluate_rows(const Model& model, Streamer& streamer,
                                       std::span<const TextRow> rows, std::size_t batch,
                                       const std::function<bool(std::size_t)>& after_each,
                                       Forward&& forward) {
  const detail::EvaluationMode<Streamer> evaluating{streamer};
  const c10::NoGradGuard no_grad;
  Evaluation result;
  LossTotal total;
  std::vector<std::size_t> numbers(rows.size());
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  for (std::size_t begin = 0; begin < rows.size(); begin += batch) {
    const auto some = std::span{numbers}.subspan(begin, std::min(batch, rows.size() - begin));
    const RowBatch together = make_row_batch(rows, some);
    auto context = model.context(together.ids, {.sequences = together.sequences});
    const at::Tensor hidden = forward(model.embed(together.ids), context);  // (B,T,C)
    total.add(loss_over_tokens(model, hidden, token_targets(together.ids, together.trained)));
    if (!std::isfinite(total.nats())) {
      throw NotFiniteError{
          "the loss is not finite; the first value that is not is in " +
          first_non_finite(model, streamer, together.ids,
                           model.context(together.ids, {.sequences = together.sequences}))};
    }
    result.tokens += together.tokens;
    if (after_each && !after_each(begin + some.size())) break;
  }
  result.mean_loss = total.mean();
  result.scored = total.count();
  return result;
}
/// @brief The same with the streamer's own forwards.
template <class Model, class Streamer>
[[nodiscard]] Evaluation evaluate_rows(const Model& model, Streamer& streamer,
                                       std::span<const TextRow> rows, std::size_t batch,
                                       const std::function<bool(std::size_t)>& after_each = {}) {
  return evaluate_rows(
      model, streamer, rows, batch, after_each,
      [&](const at::Tensor& hidden, auto& context) { return streamer.forward(hidden, context); });
}

}  // namespace block_streamer::inline v1
