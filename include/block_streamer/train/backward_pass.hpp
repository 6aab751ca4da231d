// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/forward_pass.hpp>

#include <torch/csrc/autograd/autograd.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// The gradients of one backward; undefined where nothing reached.
struct StreamedGradients {
  at::Tensor input;
  std::vector<std::vector<at::Tensor>> parameters;  ///< per block, in the order of its parameters
};

namespace detail {

inline void check_unchanged(const SavedVisit& visit, BlockId block) {
  if (static_cast<std::uint32_t>(visit.input._version()) == visit.version) return;
  throw ContractViolation{"the input of block " + std::to_string(index_of(block)) +
                          " was changed in place between forward and backward"};
}

/// Recomputes one block with grad and pulls `gradient` through it. The first result is the input's
/// gradient.
template <class RunBlock, class Context>
std::vector<at::Tensor> pull_back(const RunBlock& run_block, const SavedVisit& visit,
                                  Context& context, std::span<const at::Tensor> parameters,
                                  bool input_needed, const at::Tensor& gradient) {
  const c10::AutoGradMode grad_mode{true};
  at::Tensor input = visit.input.detach().set_requires_grad(input_needed);
  at::Tensor output;
  {
    const RngScope replay{visit.random};
    output = run_block(input, context, /*training=*/true);
  }
  std::vector<at::Tensor> wanted;
  if (input_needed) wanted.push_back(input);
  wanted.insert(wanted.end(), parameters.begin(), parameters.end());
  std::vector<at::Tensor> gradients(wanted.size()), sources;
  for (const at::Tensor& one : wanted) {
    if (one.requires_grad()) sources.push_back(one);  // a parameter may be frozen by its owner
  }
  if (output.requires_grad() && !sources.empty()) {
    auto found = torch::autograd::grad({output}, sources, {gradient}, /*retain_graph=*/false,
                                       /*create_graph=*/false, /*allow_unused=*/true);
    for (std::size_t i = 0, next = 0; i < wanted.size(); ++i) {
      if (wanted[i].requires_grad()) gradients[i] = std::move(found[next++]);
    }
  }
  if (!input_needed) gradients.insert(gradients.begin(), at::Tensor{});
  return gradients;
}

}  // namespace detail

/// @brief Visits the list in reverse, fetching weights again and recomputing each block, down to
/// the lowest block with something trainable, or to the first if the input itself needs a gradient.
/// @param saved     of the forward, one per block. @param gradient  of the last block's output.
/// **Cost.** One fetch and one recompute per visited block; one block's graph at a time.
template <class Run>
[[nodiscard]] StreamedGradients backward_pass(Run& run, std::span<const SavedVisit> saved,
                                              typename Run::Context& context, at::Tensor gradient,
                                              bool input_needed) {
  const std::size_t n = run.blocks().size();
  const std::size_t lowest = input_needed ? 0 : run.blocks().lowest_trainable();
  StreamedGradients result{{}, std::vector<std::vector<at::Tensor>>(n)};
  const VisitOrder backward = descending(lowest, n), forward = ascending(0, n);
  run.walk(backward, joined(forward, backward),
           [&](BlockId block, auto&& run_block, std::span<const std::byte>) {
             const std::size_t i = index_of(block);
             if (!gradient.defined()) return;  // nothing reached this block
             detail::check_unchanged(saved[i], block);
             const bool below = i > lowest || input_needed;
             auto gradients = detail::pull_back(run_block, saved[i], context,
                                                run.blocks().parameters(i), below, gradient);
             gradient = std::move(gradients.front());
             gradients.erase(gradients.begin());
             result.parameters[i] = std::move(gradients);
           });
  result.input = std::move(gradient);
  return result;
}

}  // namespace block_streamer::inline v1
