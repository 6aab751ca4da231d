// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/backward_pass.hpp>
#include <block_streamer/train/gradient_ledger.hpp>
#include <block_streamer/train/gradient_route.hpp>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One streamed training forward as one node of the autograd graph. Inputs: the list's
/// input for each micro-batch, then every parameter of every block, then the tensors of the
/// contexts; outputs: for each micro-batch what the last block gives. Owns what its backward needs,
/// the run included.
template <class Run>
class StreamedNode final : public torch::autograd::Node {
 public:
  using Context = typename Run::Context;

  StreamedNode(std::shared_ptr<Run> run, SavedForward<Context> forward,
               torch::autograd::edge_list edges)
      : Node{std::move(edges)},
        saved{std::move(forward)},
        run_{std::move(run)},
        generation_{run_->generation()} {
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      for (const at::Tensor& parameter : run_->blocks().adapter_parameters(i))
        versions_.push_back(parameter._version());
    }
    if (run_->masters() == nullptr) return;
    for (const Master& master : run_->masters()->all())
      master_versions_.push_back(master.tensor._version());
  }

  SavedForward<Context> saved;

  [[nodiscard]] std::string name() const override { return "StreamedBackward"; }
  void release_variables() override {
    saved.visits.clear();
    saved.contexts.clear();
    released_ = true;
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& outputs) override {
    check_usable();
    const typename Run::Walk walk{*run_};
    GradientLedger ledger = make_ledger();
    PassGradients found = backward_pass(*run_, saved, by_batch(std::move(outputs)), ledger);
    torch::autograd::variable_list all = std::move(found.inputs);
    for (auto& of_block : ledger.results()) {
      for (at::Tensor& gradient : of_block) all.push_back(std::move(gradient));
    }
    for (at::Tensor& gradient : found.contexts) all.push_back(std::move(gradient));
    return all;
  }

 private:
  [[nodiscard]] std::vector<std::vector<at::Tensor>> by_batch(
      torch::autograd::variable_list outputs) const {
    std::vector<std::vector<at::Tensor>> batches(saved.contexts.size());
    for (std::size_t i = 0; i < outputs.size(); ++i)
      batches[i / (1 + Run::extra_count)].push_back(std::move(outputs[i]));
    return batches;
  }
  void check_usable() const {
    expects(!c10::GradMode::is_enabled(),
            "a streamed forward has no second derivative (create_graph=true)");
    expects(!released_,
            "this streamed forward's backward has run and freed what it saved; keep it with "
            "retain_graph=true");
    expects(generation_ == run_->generation(),
            "the streamer's dtype or adapters changed between this forward and its backward");
    for (const auto& context : saved.contexts) context.check_unchanged();
    std::size_t next = 0;
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      for (const at::Tensor& parameter : run_->blocks().adapter_parameters(i))
        check_version(parameter, versions_[next++], "a parameter of block " + std::to_string(i));
    }
    if (run_->masters() == nullptr) return;
    run_->masters()->check_in_place();
    next = 0;
    for (const Master& master : run_->masters()->all())
      check_version(master.tensor, master_versions_[next++], master.name);
  }
  static void check_version(const at::Tensor& tensor, std::int64_t version,
                            const std::string& name) {
    if (tensor._version() == version) return;
    throw ContractViolation{name +
                            " was changed in place between forward and backward; step the "
                            "optimizer after the backward"};
  }
  [[nodiscard]] GradientLedger make_ledger() const {
    StepUpdates* const updates = run_->updates();
    const bool in_step = updates != nullptr && updates->open();
    std::vector<GradientLedger::Block> blocks;
    auto edge = static_cast<std::uint32_t>(saved.contexts.size());  // after the inputs'
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      blocks.push_back({run_->blocks().parameters(i), run_->blocks().owned_masters(i), {}});
      for (std::size_t p = 0; p < blocks.back().parameters.size(); ++p)
        blocks.back().routes.push_back(route_of(next_edge(edge++), in_step));
    }
    if (in_step) updates->begin_backward();
    return {run_->masters(), std::move(blocks), in_step ? updates : nullptr};
  }

  std::shared_ptr<Run> run_;
  std::uint64_t generation_;
  std::vector<std::int64_t> versions_;         ///< of adapters' parameters
  std::vector<std::int64_t> master_versions_;  ///< of all masters: a recompute uses them all
  bool released_ = false;
};

/// @brief Stands in the graph of a forward in evaluation mode, to say why it has no gradient.
class EvaluationNode final : public torch::autograd::Node {
 public:
  using Node::Node;
  [[nodiscard]] std::string name() const override { return "StreamedEvaluation"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    throw ContractViolation{
        "this forward ran in evaluation mode and kept nothing for a backward: call train() before "
        "it"};
  }
};

namespace detail {

template <class Run>
[[nodiscard]] torch::autograd::edge_list edges_to(const Run& run,
                                                  const MicroBatches<Run>& batches) {
  std::vector<at::Tensor> inputs = batches.hidden;
  for (std::size_t i = 0; i < run.blocks().size(); ++i) {
    for (const at::Tensor& parameter : run.blocks().parameters(i)) inputs.push_back(parameter);
  }
  for (auto& context : batches.contexts) {
    for (const at::Tensor* tensor : tensors_of(context)) inputs.push_back(*tensor);
  }
  return torch::autograd::collect_next_edges(inputs);
}

/// Makes `output` the next result of `node`. One that somebody else has too (an input through
/// which nothing was computed, a tensor of the context, a result before it) becomes a fresh tensor;
/// what has no gradient keeps its place.
inline void set_history(at::Tensor& output, const std::shared_ptr<torch::autograd::Node>& node) {
  if (!output.defined() || !torch::autograd::isDifferentiableType(output.scalar_type())) {
    node->add_input_metadata(torch::autograd::Node::undefined_input{});
    return;
  }
  if (output.use_count() > 1 || output.requires_grad() || output.is_view())
    output = output.detach();
  torch::autograd::set_history(output, node);
}
template <class Run>
[[nodiscard]] PassOutputs<Run> with_history(PassOutputs<Run> outputs,
                                            const std::shared_ptr<torch::autograd::Node>& node) {
  for (std::size_t b = 0; b < outputs.hidden.size(); ++b) {
    set_history(outputs.hidden[b], node);
    for (at::Tensor& extra : outputs.extras[b]) set_history(extra, node);
  }
  return outputs;
}

template <class Run>
[[nodiscard]] bool needs_graph(const Run& run, const MicroBatches<Run>& batches) {
  const auto needs = [](const at::Tensor& input) { return input.requires_grad(); };
  const auto context_needs = [](auto& context) { return needs_gradient(context); };
  return c10::GradMode::is_enabled() && (std::ranges::any_of(batches.hidden, needs) ||
                                         std::ranges::any_of(batches.contexts, context_needs) ||
                                         run.blocks().lowest_trainable() < run.blocks().size());
}

/// What a backward will need, but for the visits.
template <class Run>
[[nodiscard]] SavedForward<typename Run::Context> begin_saving(const Run& run,
                                                               const MicroBatches<Run>& batches) {
  SavedForward<typename Run::Context> saved{{}, {}, AutocastState::capture(run.device())};
  for (auto& context : batches.contexts) saved.contexts.emplace_back(context);
  for (const at::Tensor& input : batches.hidden) {
    expects(!input.is_inference(),
            "the input was made in inference mode, which a training forward cannot keep: clone it "
            "outside of inference mode");
    saved.inputs_needed.push_back(input.requires_grad());
  }
  return saved;
}

}  // namespace detail

/// @brief One forward of the list over all micro-batches, recorded in the caller's graph as one
/// node if grad mode is on and something needs a gradient.
/// @param training  evaluation forwards record a node that explains itself.
template <class Run>
[[nodiscard]] PassOutputs<Run> streamed_forward(const std::shared_ptr<Run>& run,
                                                MicroBatches<Run> batches, bool training) {
  for (const at::Tensor& input : batches.hidden) run->check_input(input);
  const typename Run::Walk walk{*run};
  const bool needed = detail::needs_graph(*run, batches);
  if (!needed) return forward_pass(*run, std::move(batches), nullptr, training);
  auto edges = detail::edges_to(*run, batches);
  if (!training) {
    auto outputs = forward_pass(*run, std::move(batches), nullptr, /*training=*/false);
    const std::shared_ptr<torch::autograd::Node> node{new EvaluationNode{std::move(edges)},
                                                      torch::autograd::deleteNode};
    return detail::with_history(std::move(outputs), node);
  }
  const std::shared_ptr<StreamedNode<Run>> node{
      new StreamedNode<Run>{run, detail::begin_saving(*run, batches), std::move(edges)},
      torch::autograd::deleteNode};
  auto outputs = forward_pass(*run, std::move(batches), &node->saved, /*training=*/true);
  return detail::with_history(std::move(outputs), node);
}

}  // namespace block_streamer::inline v1
