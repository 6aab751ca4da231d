// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/finetune/loss_over_tokens.hpp>
#include <block_streamer/finetune/micro_batch_order.hpp>
#include <block_streamer/finetune/recorded_micro_batches.hpp>
#include <block_streamer/finetune/row_batch.hpp>
#include <block_streamer/finetune/row_order.hpp>
#include <block_streamer/models/non_finite.hpp>
#include <block_streamer/models/resident_parameters.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/optim/gradient_norm.hpp>
#include <block_streamer/train/backward_from.hpp>
#include <block_streamer/train/rng_replay.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>

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

/// What a loop does besides the plain step.
struct TrainingOptions {
  AdamWOptions adamw{};
  std::optional<double> max_grad_norm{};  ///< brings a larger global gradient norm down to this
  /// A step whose loss or gradient is not finite changes nothing and the next one follows; else it
  /// throws.
  bool skip_non_finite = false;
  MicroBatchOrder micro_batches = MicroBatchOrder::together;
  /// What messages call the streamer's parameters, in their order; empty: their numbers.
  std::vector<std::string> labels{};
};

/// What one step did.
struct StepReport {
  double loss = 0;              ///< nats per trained token of the whole step
  std::uint64_t trained = 0;    ///< tokens that the loss is about
  std::uint64_t tokens = 0;     ///< tokens that went through the model
  double gradient_norm = 0;     ///< of all gradients as one vector, before it is clipped
  std::string not_finite = {};  ///< where values stopped being finite, if the step was skipped
};

/// @brief Trains what a streamer's parameters() are, with AdamW, a step at a time; if told so, the
/// model's embedding, final norm and head as well.
/// Parameters are stepped in a sweep after the backward: a step tells the norm of its whole
/// gradient, and where that is not finite nothing may have changed.
/// The loss of a step is the sum over its trained tokens divided by their number, whatever the
/// split into micro-batches.
/// **Lifetime.** Model and streamer outlive it. **Threads.** Externally synchronised.
template <class Model, class Streamer>
class TrainingLoop {
 public:
  /// @param residents  train as well: the embedding first, norm and head after the streamer's
  /// parameters. Outlives it; null: they are frozen.
  TrainingLoop(const Model& model, Streamer& streamer, TrainingOptions options = {},
               models::ResidentParameters* residents = nullptr)
      : model_{model},
        streamer_{streamer},
        options_{std::move(options)},
        optimizer_{options_.adamw},
        residents_{residents},
        parameters_{parameters_of(streamer, residents)} {
    expects(!parameters_.empty(), "something must train: attach an adapter first");
    expects(options_.labels.empty() || options_.labels.size() == parameters_.size(),
            "one label per parameter");
  }

  /// @brief One optimizer step over these rows, `batch` of them a pass. Random numbers of the first
  /// pass come from the caller's generators, those of the others from seeds that follow from the
  /// device generator's, the step and the pass.
  /// @param stop  asked before every forward and every loss; true drops the step: nothing has
  /// changed then.
  /// @returns nullopt if the step was dropped.
  /// @throws NotFiniteError naming the step and the first block with a value that is not finite, if
  /// the loss or a gradient is not and such steps are not skipped; nothing has changed.
  [[nodiscard]] std::optional<StepReport> step(std::span<const TextRow> rows,
                                               std::span<const std::size_t> numbers,
                                               std::size_t batch, double learning_rate,
                                               const std::function<bool()>& stop = {}) {
    streamer_.train();
    drop_gradients();
    const std::vector<Part> parts = split(rows, numbers, batch);
    StepReport report;
    for (const Part& part : parts) report.trained += part.targets.count;
    expects(report.trained > 0, "a step has a trained token");
    const bool sequential = options_.micro_batches == MicroBatchOrder::sequential;
    std::vector<RngState> random = random_states(parts.size());
    for (std::size_t begin = 0; begin < parts.size() && report.not_finite.empty();) {
      const std::size_t count = sequential ? 1 : parts.size();
      if (!accumulate(std::span{parts}.subspan(begin, count),
                      std::span{random}.subspan(begin, count), stop, report)) {
        return std::nullopt;
      }
      begin += count;
    }
    random.front().apply();  // the caller's generators go on after the first pass
    if (report.not_finite.empty()) update(learning_rate, report);
    looked_up_.clear();
    ++steps_;
    return report;
  }
  /// @brief From the next step on, forward, loss and backward of a pass are recorded in a graph of
  /// the device for each shape of rows, and replayed, pass after pass; no bit depends on it. Needs
  /// block/device_graph_cuda.hpp for a CUDA backend.
  /// @throws UnsupportedError saying why they cannot be; what else is in the way is thrown by the
  /// step that meets it.
  void record_steps(CaptureOptions options = {}) {
    if (residents_ != nullptr) {
      throw UnsupportedError{
          "a training step cannot be recorded in a graph: embedding, norm and head train"};
    }
    recorded_ = recorded_micro_batches(model_, streamer_, options);
  }
  /// @brief Steps finished, skipped ones included.
  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }
  /// @brief What it has kept of the steps so far, under block 0: one entry per parameter.
  [[nodiscard]] AdamW& optimizer() noexcept { return optimizer_; }
  [[nodiscard]] const AdamW& optimizer() const noexcept { return optimizer_; }
  /// @brief The next step is `steps` + 1: of a run that goes on.
  void set_steps(std::uint64_t steps) noexcept { steps_ = steps; }

 private:
  struct Part {
    RowBatch batch;
    TokenTargets targets;
  };
  struct LookedUp {
    at::Tensor ids;    ///< (B,T)
    at::Tensor input;  ///< (B,T,C), their rows of the embedding, with a gradient
  };

  static std::vector<at::Tensor> parameters_of(const Streamer& streamer,
                                               const models::ResidentParameters* residents) {
    std::vector<at::Tensor> all;
    NamedTensors blocks;
    for (at::Tensor& parameter : streamer.parameters()) blocks.push_back({{}, parameter});
    for (auto& [name, parameter] : residents == nullptr ? blocks : residents->around(blocks))
      all.push_back(parameter);
    return all;
  }

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

  /// Where the random numbers of each pass begin.
  [[nodiscard]] std::vector<RngState> random_states(std::size_t count) const {
    const at::Device device = model_.device();
    std::vector<RngState> states{RngState::capture(device)};
    const std::uint64_t seed = step_seed(RngState::seed_of(device), steps_ + 1);
    while (states.size() < count)
      states.push_back(RngState::seeded(device, step_seed(seed, states.size())));
    return states;
  }

  /// Adds these parts' share of the step's loss and gradient, with one backward. The report says if
  /// the loss is not finite: the step is to be skipped. @returns false if stopped.
  [[nodiscard]] bool accumulate(std::span<const Part> parts, std::span<RngState> random,
                                const std::function<bool()>& stop, StepReport& report) {
    if (recorded_) return accumulate_recorded(parts, random, stop, report);
    if (stop && stop()) return false;
    const std::vector<at::Tensor> hidden = forward(parts, random);  // (B,T,C) each
    for (const Part& part : parts) report.tokens += part.batch.tokens;
    std::vector<at::Tensor> gradients;  // of hidden
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (i > 0 && stop && stop()) return false;
      // Pulled back on its own: no loss keeps its gradients of norm and head beside the others'.
      const at::Tensor scored = hidden[i].detach().set_requires_grad(true);
      const at::Tensor loss = loss_over_tokens(model_, scored, parts[i].targets).sum /
                              static_cast<double>(report.trained);
      if (!add_loss(parts[i], loss, report)) return true;
      loss.backward();
      if (residents_ != nullptr) residents_->collect();
      gradients.push_back(scored.grad());
    }
    backward_from(hidden, gradients);
    return true;
  }
  [[nodiscard]] bool accumulate_recorded(std::span<const Part> parts, std::span<RngState> random,
                                         const std::function<bool()>& stop, StepReport& report) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (stop && stop()) return false;
      auto context = context_of(parts[i]);
      at::Tensor loss;
      {
        const RngTurn turn{&random[i]};
        loss = recorded_(embed(parts[i]), context, parts[i].targets,
                         static_cast<double>(report.trained));
      }
      report.tokens += parts[i].batch.tokens;
      if (!add_loss(parts[i], loss, report)) return true;
    }
    return true;
  }
  /// @returns false if it is not finite: the step is to be skipped, the report says why.
  [[nodiscard]] bool add_loss(const Part& part, const at::Tensor& loss, StepReport& report) {
    const double value = loss.template item<double>();
    report.loss += value;
    if (std::isfinite(value)) return true;
    report.not_finite = "the loss is not finite; the first value that is not is in " +
                        first_non_finite(model_, streamer_, part.batch.ids, context_of(part));
    refuse_or_skip(report);
    return false;
  }
  [[nodiscard]] std::vector<at::Tensor> forward(std::span<const Part> parts,
                                                std::span<RngState> random) {
    std::vector<at::Tensor> inputs;
    std::vector<decltype(context_of(parts[0]))> contexts;
    for (const Part& part : parts) {
      inputs.push_back(embed(part));
      contexts.push_back(context_of(part));
    }
    return streamer_.forward(inputs, contexts, random);
  }
  [[nodiscard]] auto context_of(const Part& part) const {
    return model_.context(part.batch.ids, {.sequences = part.batch.sequences});
  }
  [[nodiscard]] at::Tensor embed(const Part& part) {
    if (residents_ == nullptr) return model_.embed(part.batch.ids);
    const c10::NoGradGuard no_grad;  // the gradient is taken at the end of the step
    at::Tensor input = model_.embed(part.batch.ids).set_requires_grad(true);
    looked_up_.push_back({part.batch.ids, input});
    return input;
  }

  void update(double learning_rate, StepReport& report) {
    // Pass by pass, whatever order the passes were pulled back in.
    for (const auto& [ids, input] : looked_up_)
      residents_->add_embedding_gradient(ids, input.grad());
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    report.gradient_norm = global_gradient_norm(gradients);
    if (!std::isfinite(report.gradient_norm)) {
      report.not_finite =
          "a gradient is not finite; the first in the backward's order is that of " +
          first_bad_gradient(gradients);
      refuse_or_skip(report);
      return;
    }
    const double scale =
        options_.max_grad_norm ? clip_factor(report.gradient_norm, *options_.max_grad_norm) : 1;
    optimizer_.begin_step(
        {.step = steps_ + 1, .learning_rate = learning_rate, .gradient_scale = scale});
    optimizer_.update(BlockId{}, parameters_, gradients);
    optimizer_.end_step();
    if (residents_ != nullptr) residents_->refresh();
  }

  void refuse_or_skip(const StepReport& report) {
    drop_gradients();
    if (options_.skip_non_finite) return;
    throw NotFiniteError{"step " + std::to_string(steps_ + 1) + ": " + report.not_finite};
  }
  void drop_gradients() {
    for (const at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor{};
    if (residents_ != nullptr) residents_->drop_gradients();
    looked_up_.clear();
  }
  /// The backward goes from the last block to the first.
  [[nodiscard]] std::string first_bad_gradient(const std::vector<at::Tensor>& gradients) const {
    for (std::size_t i = gradients.size(); i-- > 0;) {
      if (!gradients[i].defined() || at::isfinite(gradients[i]).all().template item<bool>())
        continue;
      return options_.labels.empty() ? "parameter " + std::to_string(i) : options_.labels[i];
    }
    return "none of them alone: their squares are too large to be added";
  }

  const Model& model_;
  Streamer& streamer_;
  TrainingOptions options_;
  AdamW optimizer_;
  models::ResidentParameters* residents_;
  std::vector<at::Tensor> parameters_;
  std::vector<LookedUp> looked_up_;  ///< in the running step, where the embedding trains
  MicroBatchStep<typename Streamer::Context> recorded_;  ///< empty: steps are not recorded
  std::uint64_t steps_ = 0;
};

}  // namespace block_streamer::inline v1
