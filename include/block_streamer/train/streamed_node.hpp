// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/backward_pass.hpp>
#include <block_streamer/train/gradient_ledger.hpp>
#include <block_streamer/train/gradient_route.hpp>

#include <ATen/autocast_mode.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One streamed training forward as one node of the autograd graph. Inputs: the list's
/// input, then every parameter of every block. Owns what its backward needs, the run included.
template <class Run>
class StreamedNode final : public torch::autograd::Node {
 public:
  using Context = typename Run::Context;

  StreamedNode(std::shared_ptr<Run> run, const Context& context, torch::autograd::edge_list edges)
      : Node{std::move(edges)},
        run_{std::move(run)},
        context_{context},
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
  bool input_needed = false;

  [[nodiscard]] std::string name() const override { return "StreamedBackward"; }
  void release_variables() override {
    saved.clear();
    released_ = true;
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& outputs) override {
    check_usable();
    const typename Run::Walk walk{*run_};
    GradientLedger ledger = make_ledger();
    torch::autograd::variable_list all{
        backward_pass(*run_, saved, context_, outputs.at(0), input_needed, ledger)};
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
    std::uint32_t edge = 1;  // 0 is the input's
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      blocks.push_back({run_->blocks().parameters(i), run_->blocks().owned_masters(i), {}});
      for (std::size_t p = 0; p < blocks.back().parameters.size(); ++p)
        blocks.back().routes.push_back(route_of(next_edge(edge++), in_step));
    }
    if (in_step) updates->begin_backward();
    return {run_->masters(), std::move(blocks), in_step ? updates : nullptr};
  }

  std::shared_ptr<Run> run_;
  Context context_;
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
[[nodiscard]] torch::autograd::edge_list edges_to(const Run& run, const at::Tensor& input) {
  std::vector<at::Tensor> inputs{input};
  for (std::size_t i = 0; i < run.blocks().size(); ++i) {
    for (const at::Tensor& parameter : run.blocks().parameters(i)) inputs.push_back(parameter);
  }
  return torch::autograd::collect_next_edges(inputs);
}

/// The output as the result of `node`. A forward whose output is its input (nothing computed) gets
/// a fresh tensor.
[[nodiscard]] inline at::Tensor with_history(at::Tensor output, const at::Tensor& input,
                                             const std::shared_ptr<torch::autograd::Node>& node) {
  if (output.unsafeGetTensorImpl() == input.unsafeGetTensorImpl() || output.requires_grad() ||
      output.is_view())
    output = output.detach();
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace detail

/// @brief One forward of the list, recorded in the caller's graph if grad mode is on and something
/// needs a gradient.
/// @param training  evaluation forwards record a node that explains itself.
template <class Run>
[[nodiscard]] typename Run::Hidden streamed_forward(const std::shared_ptr<Run>& run,
                                                    const typename Run::Hidden& input,
                                                    typename Run::Context& context, bool training) {
  run->check_input(input);
  const typename Run::Walk walk{*run};
  const bool needed =
      c10::GradMode::is_enabled() &&
      (input.requires_grad() || run->blocks().lowest_trainable() < run->blocks().size());
  if (needed && training && at::autocast::is_autocast_enabled(run->device().type())) {
    throw UnsupportedError{
        "a training forward under autocast is not supported yet: its recompute would not cast "
        "alike"};
  }
  if (!needed) return forward_pass(*run, input, context, nullptr, training);
  auto edges = detail::edges_to(*run, input);
  if (!training) {
    at::Tensor output = forward_pass(*run, input, context, nullptr, /*training=*/false);
    const std::shared_ptr<torch::autograd::Node> node{new EvaluationNode{std::move(edges)},
                                                      torch::autograd::deleteNode};
    return detail::with_history(std::move(output), input, node);
  }
  const std::shared_ptr<StreamedNode<Run>> node{
      new StreamedNode<Run>{run, context, std::move(edges)}, torch::autograd::deleteNode};
  node->input_needed = input.requires_grad();
  at::Tensor output = forward_pass(*run, input, context, &node->saved, /*training=*/true);
  return detail::with_history(std::move(output), input, node);
}

}  // namespace block_streamer::inline v1
