// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/backward_pass.hpp>
#include <block_streamer/train/gradient_ledger.hpp>
#include <block_streamer/train/gradient_route.hpp>

#include <ATen/autocast_mode.h>

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
/// input for each micro-batch, then every parameter of every block; one output for each
/// micro-batch. Owns what its backward needs, the run included.
template <class Run>
class StreamedNode final : public torch::autograd::Node {
 public:
  using Context = typename Run::Context;

  StreamedNode(std::shared_ptr<Run> run, std::span<const Context> contexts,
               torch::autograd::edge_list edges)
      : Node{std::move(edges)},
        run_{std::move(run)},
        contexts_(contexts.begin(), contexts.end()),
        generation_{run_->generation()} {
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      for (const at::Tensor& parameter : run_->blocks().adapter_parameters(i))
        versions_.push_back(parameter._version());
    }
    if (run_->masters() == nullptr) return;
    for (const Master& master : run_->masters()->all())
      master_versions_.push_back(master.tensor._version());
  }

  std::vector<SavedVisit> saved;
  std::vector<bool> inputs_needed;  ///< per micro-batch

  [[nodiscard]] std::string name() const override { return "StreamedBackward"; }
  void release_variables() override {
    saved.clear();
    released_ = true;
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& outputs) override {
    check_usable();
    const typename Run::Walk walk{*run_};
    GradientLedger ledger = make_ledger();
    torch::autograd::variable_list all =
        backward_pass(*run_, saved, contexts_, std::move(outputs), inputs_needed, ledger);
    for (auto& of_block : ledger.results()) {
      for (at::Tensor& gradient : of_block) all.push_back(std::move(gradient));
    }
    return all;
  }

 private:
  void check_usable() const {
    expects(!c10::GradMode::is_enabled(),
            "a streamed forward has no second derivative (create_graph=true)");
    expects(!released_,
            "this streamed forward's backward has run and freed what it saved; keep it with "
            "retain_graph=true");
    expects(generation_ == run_->generation(),
            "the streamer's dtype or adapters changed between this forward and its backward");
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
    auto edge = static_cast<std::uint32_t>(contexts_.size());  // after the inputs'
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      blocks.push_back({run_->blocks().parameters(i), run_->blocks().owned_masters(i), {}});
      for (std::size_t p = 0; p < blocks.back().parameters.size(); ++p)
        blocks.back().routes.push_back(route_of(next_edge(edge++), in_step));
    }
    if (in_step) updates->begin_backward();
    return {run_->masters(), std::move(blocks), in_step ? updates : nullptr};
  }

  std::shared_ptr<Run> run_;
  std::vector<Context> contexts_;  ///< per micro-batch
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
[[nodiscard]] torch::autograd::edge_list edges_to(const Run& run, std::vector<at::Tensor> inputs) {
  for (std::size_t i = 0; i < run.blocks().size(); ++i) {
    for (const at::Tensor& parameter : run.blocks().parameters(i)) inputs.push_back(parameter);
  }
  return torch::autograd::collect_next_edges(inputs);
}

/// The output as the next result of `node`. A forward whose output is its input (nothing computed),
/// or already a result, gets a fresh tensor.
[[nodiscard]] inline at::Tensor with_history(at::Tensor output, const at::Tensor& input,
                                             const std::shared_ptr<torch::autograd::Node>& node) {
  if (output.unsafeGetTensorImpl() == input.unsafeGetTensorImpl() || output.requires_grad() ||
      output.is_view())
    output = output.detach();
  torch::autograd::set_history(output, node);
  return output;
}
[[nodiscard]] inline std::vector<at::Tensor> with_history(
    std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
    const std::shared_ptr<torch::autograd::Node>& node) {
  for (std::size_t b = 0; b < outputs.size(); ++b)
    outputs[b] = with_history(std::move(outputs[b]), inputs[b], node);
  return outputs;
}

template <class Run>
[[nodiscard]] bool needs_graph(const Run& run, const std::vector<at::Tensor>& inputs) {
  const auto needs = [](const at::Tensor& input) { return input.requires_grad(); };
  return c10::GradMode::is_enabled() && (std::ranges::any_of(inputs, needs) ||
                                         run.blocks().lowest_trainable() < run.blocks().size());
}

}  // namespace detail

/// @brief One forward of the list over all micro-batches, recorded in the caller's graph as one
/// node if grad mode is on and something needs a gradient.
/// @param training  evaluation forwards record a node that explains itself.
template <class Run>
[[nodiscard]] std::vector<typename Run::Hidden> streamed_forward(const std::shared_ptr<Run>& run,
                                                                 MicroBatches<Run> batches,
                                                                 bool training) {
  for (const at::Tensor& input : batches.hidden) run->check_input(input);
  const typename Run::Walk walk{*run};
  const bool needed = detail::needs_graph(*run, batches.hidden);
  if (needed && training && at::autocast::is_autocast_enabled(run->device().type())) {
    throw UnsupportedError{
        "a training forward under autocast is not supported yet: its recompute would not cast "
        "alike"};
  }
  if (!needed) return forward_pass(*run, std::move(batches), nullptr, training);
  const std::vector<at::Tensor> inputs = batches.hidden;
  auto edges = detail::edges_to(*run, inputs);
  if (!training) {
    auto outputs = forward_pass(*run, std::move(batches), nullptr, /*training=*/false);
    const std::shared_ptr<torch::autograd::Node> node{new EvaluationNode{std::move(edges)},
                                                      torch::autograd::deleteNode};
    return detail::with_history(std::move(outputs), inputs, node);
  }
  const std::shared_ptr<StreamedNode<Run>> node{
      new StreamedNode<Run>{run, batches.contexts, std::move(edges)}, torch::autograd::deleteNode};
  for (const at::Tensor& input : inputs) node->inputs_needed.push_back(input.requires_grad());
  auto outputs = forward_pass(*run, std::move(batches), &node->saved, /*training=*/true);
  return detail::with_history(std::move(outputs), inputs, node);
}

}  // namespace block_streamer::inline v1
