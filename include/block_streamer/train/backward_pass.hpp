// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/block_gradients.hpp>
#include <block_streamer/train/forward_pass.hpp>
#include <block_streamer/train/gradient_ledger.hpp>

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What a backward gives to whatever the list was given.
struct PassGradients {
  std::vector<at::Tensor> inputs;    ///< per micro-batch
  std::vector<at::Tensor> contexts;  ///< per micro-batch, and of each the context's tensors
};

namespace detail {

inline void check_unchanged(const SavedInput& input, BlockId block) {
  if (!input.kept.defined() || static_cast<std::uint32_t>(input.kept._version()) == input.version)
    return;
  throw ContractViolation{"the input of block " + std::to_string(index_of(block)) +
                          " was changed in place between forward and backward"};
}

/// One block and micro-batch as they were in the forward, and what is pulled through them.
struct Recompute {
  at::Tensor input;
  bool input_needed;
  const std::optional<RngState>& random;  ///< where its random numbers began
  const AutocastState& autocast;
  std::span<const at::Tensor> gradients;  ///< of what flowed on, and of the extras if there are any
};

/// What a recompute gave, as far as a gradient is pulled through it.
struct Pulled {
  std::vector<at::Tensor> outputs, gradients;
  void add(const at::Tensor& output, const at::Tensor& gradient) {
    if (!gradient.defined() || !output.defined() || !output.requires_grad()) return;
    outputs.push_back(output);
    gradients.push_back(gradient);
  }
};

/// Runs the block again, as it ran then.
template <class Run, class RunBlock>
Pulled run_again(const Run& run, BlockId block, const RunBlock& run_block, const at::Tensor& input,
                 typename Run::Context& context, const Recompute& recompute) {
  const std::shared_ptr<void> random = run.replay_random(block, recompute.random);
  const AutocastScope casts{recompute.autocast, run.device()};
  std::vector<at::Tensor> extras;
  const bool whole = recompute.gradients.size() > 1;
  Pulled pulled;
  pulled.add(run_block(input, context, /*training=*/true, whole ? &extras : nullptr),
             recompute.gradients[0]);
  for (std::size_t i = 0; i < extras.size(); ++i) pulled.add(extras[i], recompute.gradients[1 + i]);
  return pulled;
}

/// Recomputes one block with grad and pulls the gradients through it.
template <class Run, class RunBlock>
PulledGradients pull_back(Run& run, BlockId block, const RunBlock& run_block,
                          const Recompute& recompute, SavedContext<typename Run::Context>& saved) {
  const c10::AutoGradMode grad_mode{true};
  at::Tensor input = recompute.input.detach().set_requires_grad(recompute.input_needed);
  typename SavedContext<typename Run::Context>::Loan context{saved};
  const Pulled outputs = run_again(run, block, run_block, input, context.context(), recompute);
  const auto trained = run.blocks().trained();
  const auto adapters = run.blocks().adapter_parameters(index_of(block));
  PulledGradients pulled{{},
                         {},
                         std::vector<at::Tensor>(trained.size()),
                         std::vector<at::Tensor>(adapters.size()),
                         std::vector<at::Tensor>(saved.size())};
  for (const TrainedWeight& weight : trained) pulled.masters.push_back(weight.master);
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor*> targets;
  const auto want = [&](const at::Tensor& source, at::Tensor& target) {
    if (!source.requires_grad()) return;  // a parameter may be frozen by its owner
    sources.push_back(source);
    targets.push_back(&target);
  };
  want(input, pulled.input);
  for (std::size_t i = 0; i < trained.size(); ++i) want(trained[i].leaf, pulled.trained[i]);
  for (std::size_t i = 0; i < adapters.size(); ++i) want(adapters[i], pulled.adapters[i]);
  for (std::size_t i = 0; i < saved.size(); ++i) {
    if (saved.needed(i)) want(context.leaves()[i], pulled.context[i]);
  }
  if (outputs.outputs.empty() || sources.empty()) return pulled;
  auto found =
      torch::autograd::grad(outputs.outputs, sources, outputs.gradients, /*retain_graph=*/false,
                            /*create_graph=*/false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < found.size(); ++i) *targets[i] = std::move(found[i]);
  return pulled;
}

/// Leaves nothing in flight behind if the backward fails.
template <class Run>
struct GradientsInFlight {
  Run& run;
  ~GradientsInFlight() { run.abandon_gradients(); }
};

/// What a backward comes down through: visits, and in a visit micro-batches.
template <class Context>
struct BackwardPath {
  SavedForward<Context>& saved;
  /// Per micro-batch: of what the block at hand gave, the list's last one with its extras.
  std::vector<std::vector<at::Tensor>> gradients;
  std::size_t trainable;  ///< the lowest block with a parameter that does
  std::vector<std::vector<GradientSum>> of_contexts{};  ///< per micro-batch and tensor

  [[nodiscard]] const SavedVisit& visit(std::size_t block, std::size_t batch) const {
    return saved.visits[block * gradients.size() + batch];
  }
  /// There is a gradient to pull through, and something below or here that asks for it.
  [[nodiscard]] bool leads_through(std::size_t block, std::size_t batch) const {
    const auto defined = [](const at::Tensor& gradient) { return gradient.defined(); };
    return std::ranges::any_of(gradients[batch], defined) &&
           (block >= trainable || saved.reaches_first(batch)) && visit(block, batch).input.held();
  }
  /// The input that is wanted after this one, as far as can be known; null: none.
  [[nodiscard]] const SavedInput* after(std::size_t block, std::size_t batch,
                                        std::size_t lowest) const {
    while (++batch < gradients.size()) {
      if (leads_through(block, batch)) return &visit(block, batch).input;
    }
    if (block == lowest) return nullptr;
    for (batch = 0; batch < gradients.size(); ++batch) {
      if (leads_through(block - 1, batch)) return &visit(block - 1, batch).input;
    }
    return nullptr;
  }

  /// From what a block gave to what it was given.
  void take(std::size_t batch, PulledGradients& pulled) {
    const c10::NoGradGuard no_grad;
    gradients[batch] = {std::move(pulled.input)};
    for (std::size_t i = 0; i < pulled.context.size(); ++i)
      of_contexts[batch][i].add(std::move(pulled.context[i]));
  }
  [[nodiscard]] PassGradients at_the_end() {
    PassGradients result;
    for (std::size_t b = 0; b < gradients.size(); ++b) {
      const bool wanted = saved.inputs_needed[b];
      result.inputs.push_back(wanted ? std::move(gradients[b].front()) : at::Tensor{});
      for (GradientSum& sum : of_contexts[b]) result.contexts.push_back(sum.take());
    }
    return result;
  }
};

/// One micro-batch of one visit; begins to bring back what is wanted after it.
template <class Run, class RunBlock>
PulledGradients pull_visit(Run& run, BlockId block, const RunBlock& run_block,
                           const BackwardPath<typename Run::Context>& path, std::size_t batch,
                           std::size_t lowest) {
  const std::size_t i = index_of(block);
  const SavedVisit& visit = path.visit(i, batch);
  check_unchanged(visit.input, block);
  const at::Tensor input = run.activations().take(visit.input, run.compute());
  if (const SavedInput* const next = path.after(i, batch, lowest))
    run.activations().bring(*next, run.compute());
  const bool input_needed = path.saved.inputs_needed[batch] || i > path.trainable ||
                            (i > 0 && path.saved.contexts[batch].any_needed());
  PulledGradients pulled =
      pull_back(run, block, run_block,
                {input, input_needed, visit.random, path.saved.autocast, path.gradients[batch]},
                path.saved.contexts[batch]);
  if (run.blocks().mode(block) != visit.mode) {
    throw ContractViolation{to_string(PartId{block}) +
                            ": parts of its module were switched between training and evaluation "
                            "between a forward and its backward"};
  }
  return pulled;
}

}  // namespace detail

/// @brief Visits the list in reverse, fetching weights again and recomputing each block, down to
/// the lowest block with something trainable, or to the first if an input needs a gradient. In a
/// visit each micro-batch is recomputed and pulled through in turn, while the saved input of the
/// next is on its way; the gradients of parameters are summed in that order.
/// @param gradients  per micro-batch, of what the last block gave; undefined: not asked for.
/// @param ledger     receives the gradients of parameters, block by block.
/// @returns the gradients of the list's inputs and of the contexts' tensors; undefined where none
/// is needed.
/// **Cost.** One fetch per visited block, one recompute per block and micro-batch; one graph of one
/// block at a time. With masters that train one host wait at the end.
template <class Run>
[[nodiscard]] PassGradients backward_pass(Run& run, SavedForward<typename Run::Context>& saved,
                                          std::vector<std::vector<at::Tensor>> gradients,
                                          GradientLedger& ledger) {
  const std::size_t n = run.blocks().size();
  detail::BackwardPath<typename Run::Context> path{saved, std::move(gradients),
                                                   run.blocks().lowest_trainable()};
  for (const auto& context : saved.contexts) path.of_contexts.emplace_back(context.size());
  const std::size_t lowest = saved.any_reaches_first() ? 0 : path.trainable;
  const VisitOrder backward = descending(lowest, n), forward = ascending(0, n);
  const MasterRelease release{run, /*backward_follows=*/false};
  const detail::GradientsInFlight<Run> in_flight{run};
  const ActivationsInFlight<Run> inputs_in_flight{run};
  run.walk(backward, release.due() ? VisitOrder{} : joined(forward, backward),
           [&](BlockId block, auto&& run_block, std::span<const std::byte>) {
             BlockGradients sums;
             for (std::size_t b = 0; b < path.gradients.size(); ++b) {
               if (!path.leads_through(index_of(block), b)) continue;
               auto pulled = detail::pull_visit(run, block, run_block, path, b, lowest);
               run.end_visit();  // masters are themselves again, and leaves
               path.take(b, pulled);
               sums.add(std::move(pulled), run.masters());
             }
             if (!sums.any()) return;
             run.take_gradients(ledger, block, sums.masters(), sums.take_trained(),
                                sums.take_adapters());
           });
  run.activations().settle(run.compute());
  run.settle_gradients(ledger);
  return path.at_the_end();
}

}  // namespace block_streamer::inline v1
