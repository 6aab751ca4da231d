// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/block_gradients.hpp>
#include <block_streamer/train/forward_pass.hpp>
#include <block_streamer/train/gradient_ledger.hpp>

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

inline void check_unchanged(const SavedInput& input, BlockId block) {
  if (!input.kept.defined() || static_cast<std::uint32_t>(input.kept._version()) == input.version)
    return;
  throw ContractViolation{"the input of block " + std::to_string(index_of(block)) +
                          " was changed in place between forward and backward"};
}

/// Recomputes one block with grad and pulls `gradient` through it.
/// @param saved  its input then. @param random  where its random numbers began.
template <class Run, class RunBlock>
PulledGradients pull_back(Run& run, BlockId block, const RunBlock& run_block,
                          const at::Tensor& saved, const RngState& random,
                          typename Run::Context& context, bool input_needed,
                          const at::Tensor& gradient) {
  const c10::AutoGradMode grad_mode{true};
  at::Tensor input = saved.detach().set_requires_grad(input_needed);
  at::Tensor output;
  {
    const RngScope replay{random};
    output = run_block(input, context, /*training=*/true);
  }
  const auto trained = run.blocks().trained();
  const auto adapters = run.blocks().adapter_parameters(index_of(block));
  PulledGradients pulled{
      {}, {}, std::vector<at::Tensor>(trained.size()), std::vector<at::Tensor>(adapters.size())};
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
  if (!output.requires_grad() || sources.empty()) return pulled;
  auto found = torch::autograd::grad({output}, sources, {gradient}, /*retain_graph=*/false,
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
struct BackwardPath {
  std::span<const SavedVisit> saved;
  std::vector<at::Tensor> gradients;  ///< per micro-batch: of the output of the block at hand
  const std::vector<bool>& needed;    ///< per micro-batch: the list's input needs a gradient
  std::size_t trainable;              ///< the lowest block with a parameter that does

  [[nodiscard]] const SavedVisit& visit(std::size_t block, std::size_t batch) const {
    return saved[block * gradients.size() + batch];
  }
  /// There is a gradient to pull through, and something below or here that asks for it.
  [[nodiscard]] bool leads_through(std::size_t block, std::size_t batch) const {
    return gradients[batch].defined() && (block >= trainable || needed[batch]) &&
           visit(block, batch).input.held();
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
};

/// One micro-batch of one visit; begins to bring back what is wanted after it.
template <class Run, class RunBlock>
PulledGradients pull_visit(Run& run, BlockId block, const RunBlock& run_block,
                           typename Run::Context& context, const BackwardPath& path,
                           std::size_t batch, std::size_t lowest) {
  const std::size_t i = index_of(block);
  const SavedVisit& visit = path.visit(i, batch);
  check_unchanged(visit.input, block);
  const at::Tensor input = run.activations().take(visit.input, run.compute());
  if (const SavedInput* const next = path.after(i, batch, lowest))
    run.activations().bring(*next, run.compute());
  return pull_back(run, block, run_block, input, *visit.random, context,
                   i > path.trainable || path.needed[batch], path.gradients[batch]);
}

}  // namespace detail

/// @brief Visits the list in reverse, fetching weights again and recomputing each block, down to
/// the lowest block with something trainable, or to the first if an input needs a gradient. In a
/// visit each micro-batch is recomputed and pulled through in turn, while the saved input of the
/// next is on its way; the gradients of parameters are summed in that order.
/// @param saved      of the forward, visit by visit and in a visit by micro-batch.
/// @param gradients  of the last block's output, one per micro-batch; undefined: not asked for.
/// @param needed     whether the list's input needs a gradient, one per micro-batch.
/// @param ledger     receives the gradients of parameters, block by block.
/// @returns the gradients of the list's inputs; undefined where none is needed.
/// **Cost.** One fetch per visited block, one recompute per block and micro-batch; one graph of one
/// block at a time. With masters that train one host wait at the end.
template <class Run>
[[nodiscard]] std::vector<at::Tensor> backward_pass(Run& run, std::span<const SavedVisit> saved,
                                                    std::span<typename Run::Context> contexts,
                                                    std::vector<at::Tensor> gradients,
                                                    const std::vector<bool>& needed,
                                                    GradientLedger& ledger) {
  const std::size_t n = run.blocks().size();
  detail::BackwardPath path{saved, std::move(gradients), needed, run.blocks().lowest_trainable()};
  const bool to_input = std::ranges::find(needed, true) != needed.end();
  const std::size_t lowest = to_input ? 0 : path.trainable;
  const VisitOrder backward = descending(lowest, n), forward = ascending(0, n);
  const MasterRelease release{run, /*backward_follows=*/false};
  const detail::GradientsInFlight<Run> in_flight{run};
  const ActivationsInFlight<Run> inputs_in_flight{run};
  run.walk(backward, release.due() ? VisitOrder{} : joined(forward, backward),
           [&](BlockId block, auto&& run_block, std::span<const std::byte>) {
             BlockGradients sums;
             for (std::size_t b = 0; b < contexts.size(); ++b) {
               if (!path.leads_through(index_of(block), b)) continue;
               auto pulled =
                   detail::pull_visit(run, block, run_block, contexts[b], path, b, lowest);
               run.end_visit();  // masters are themselves again, and leaves
               path.gradients[b] = std::move(pulled.input);
               sums.add(std::move(pulled), run.masters());
             }
             if (!sums.any()) return;
             run.take_gradients(ledger, block, sums.masters(), sums.take_trained(),
                                sums.take_adapters());
           });
  run.activations().settle(run.compute());
  run.settle_gradients(ledger);
  for (std::size_t b = 0; b < needed.size(); ++b) {
    if (!needed[b]) path.gradients[b] = at::Tensor{};
  }
  return std::move(path.gradients);
}

}  // namespace block_streamer::inline v1
