// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/row_batch.hpp>
#include <block_streamer/models/non_finite.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What one step did.
struct StepReport {
  double loss = 0;            ///< nats per trained token of the whole step
  std::uint64_t trained = 0;  ///< tokens that the loss is about
  std::uint64_t tokens = 0;   ///< tokens that went through the model
};

/// @brief Trains what a streamer's parameters() are, with AdamW, a step at a time.
/// The loss of a step is the sum over its trained tokens divided by their number, whatever the
/// split into micro-batches.
/// **Lifetime.** Model and streamer outlive it. **Threads.** Externally synchronised.
template <class Model, class Streamer>
class TrainingLoop {
 public:
  TrainingLoop(const Model& model, Streamer& streamer, AdamWOptions options = {})
      : model_{model},
        streamer_{streamer},
        optimizer_{options},
        parameters_{streamer.parameters()} {
    expects(!parameters_.empty(), "something must train: attach an adapter first");
  }

  /// @brief One optimizer step over these rows, `batch` of them a pass.
  /// @param stop  asked before every pass; true drops the step: nothing has changed then.
  /// @returns nullopt if the step was dropped.
  /// @throws Error naming the step and the first block with a value that is not finite, if the loss
  /// is not; nothing has changed.
  [[nodiscard]] std::optional<StepReport> step(std::span<const TextRow> rows,
                                               std::span<const std::size_t> numbers,
                                               std::size_t batch, double learning_rate,
                                               const std::function<bool()>& stop = {}) {
    streamer_.train();
    for (const at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor{};
    const std::vector<Part> parts = split(rows, numbers, batch);
    StepReport report;
    for (const Part& part : parts) report.trained += part.targets.count;
    expects(report.trained > 0, "a step has a trained token");
    for (const Part& part : parts) {
      if (stop && stop()) return std::nullopt;
      report.loss += accumulate(part, static_cast<double>(report.trained));
      report.tokens += part.batch.tokens;
    }
    update(learning_rate);
    return report;
  }
  /// @brief Steps finished.
  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }

 private:
  struct Part {
    RowBatch batch;
    TokenTargets targets;
  };

  static std::vector<Part> split(std::span<const TextRow> rows,
                                 std::span<const std::size_t> numbers, std::size_t batch) {
    std::vector<Part> parts;
    for (std::size_t begin = 0; begin < numbers.size(); begin += batch) {
      RowBatch together =
          make_row_batch(rows, numbers.subspan(begin, std::min(batch, numbers.size() - begin)));
      TokenTargets targets = token_targets(together.ids, together.trained);
      if (targets.count > 0) parts.push_back({std::move(together), std::move(targets)});
    }
    return parts;
  }

  /// Adds the part's share of the step's gradient; returns its share of the loss.
  double accumulate(const Part& part, double step_count) {
    auto context = model_.context(part.batch.ids);
    const at::Tensor hidden = streamer_.forward(model_.embed(part.batch.ids), context);  // (B,T,C)
    const at::Tensor loss = token_loss(model_.logits(hidden), part.targets).sum / step_count;
    const double value = loss.template item<double>();
    if (!std::isfinite(value)) {
      throw Error{"step " + std::to_string(steps_ + 1) +
                  ": the loss is not finite; the first value that is not is in " +
                  first_non_finite(model_, streamer_, part.batch.ids)};
    }
    loss.backward();
    return value;
  }

  void update(double learning_rate) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    optimizer_.begin_step({.step = steps_ + 1, .learning_rate = learning_rate});
    optimizer_.update(BlockId{}, parameters_, gradients);
    optimizer_.end_step();
    ++steps_;
  }

  const Model& model_;
  Streamer& streamer_;
  AdamW optimizer_;
  std::vector<at::Tensor> parameters_;
  std::uint64_t steps_ = 0;
};

}  // namespace block_streamer::inline v1
