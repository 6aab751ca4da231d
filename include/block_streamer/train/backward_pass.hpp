// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/forward_pass.hpp>
#include <block_streamer/train/gradient_ledger.hpp>

#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

inline void check_unchanged(const SavedVisit& visit, BlockId block) {
  if (static_cast<std::uint32_t>(visit.input._version()) == visit.version) return;
  throw ContractViolation{"the input of block " + std::to_string(index_of(block)) +
                          " was changed in place between forward and backward"};
}

/// What one block's backward gives; undefined where nothing reached.
struct PulledGradients {
  at::Tensor input;
  std::vector<std::uint32_t> masters;  ///< whose weights in this block train
  std::vector<at::Tensor> trained;     ///< the gradients of those weights
  std::vector<at::Tensor> adapters;    ///< of the block's adapters, in their order
};

/// Recomputes one block with grad and pulls `gradient` through it.
template <class Run, class RunBlock>
PulledGradients pull_back(Run& run, BlockId block, const RunBlock& run_block,
                          const SavedVisit& visit, typename Run::Context& context,
                          bool input_needed, const at::Tensor& gradient) {
  const c10::AutoGradMode grad_mode{true};
  at::Tensor input = visit.input.detach().set_requires_grad(input_needed);
  at::Tensor output;
  {
    const RngScope replay{visit.random};
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

}  // namespace detail

/// @brief Visits the list in reverse, fetching weights again and recomputing each block, down to
/// the lowest block with something trainable, or to the first if the input itself needs a gradient.
/// @param saved     of the forward, one per block. @param gradient  of the last block's output.
/// @param ledger    receives the gradients of parameters, block by block.
/// @returns the gradient of the list's input; undefined if it needs none.
/// **Cost.** One fetch and one recompute per visited block; one block's graph at a time. With
/// masters that train one host wait at the end.
template <class Run>
[[nodiscard]] at::Tensor backward_pass(Run& run, std::span<const SavedVisit> saved,
                                       typename Run::Context& context, at::Tensor gradient,
                                       bool input_needed, GradientLedger& ledger) {
  const std::size_t n = run.blocks().size();
  const std::size_t lowest = input_needed ? 0 : run.blocks().lowest_trainable();
  const VisitOrder backward = descending(lowest, n), forward = ascending(0, n);
  const MasterRelease release{run, /*backward_follows=*/false};
  const detail::GradientsInFlight<Run> in_flight{run};
  run.walk(backward, release.due() ? VisitOrder{} : joined(forward, backward),
           [&](BlockId block, auto&& run_block, std::span<const std::byte>) {
             const std::size_t i = index_of(block);
             if (!gradient.defined()) return;  // nothing reached this block
             detail::check_unchanged(saved[i], block);
             const bool below = i > lowest || input_needed;
             auto pulled =
                 detail::pull_back(run, block, run_block, saved[i], context, below, gradient);
             gradient = std::move(pulled.input);
             run.end_visit();  // masters are themselves again, and leaves
             run.take_gradients(ledger, block, pulled.masters, std::move(pulled.trained),
                                std::move(pulled.adapters));
           });
  run.settle_gradients(ledger);
  return gradient;
}

}  // namespace block_streamer::inline v1
