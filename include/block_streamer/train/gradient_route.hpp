// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>

namespace block_streamer::inline v1 {

/// Where the gradient of one parameter goes in a backward.
enum class GradientRoute : std::uint8_t {
  drop,        ///< nobody asked for it
  accumulate,  ///< into .grad, block by block
  engine,      ///< returned to the engine: it is captured (autograd::grad), or hooks want to see it
  update,      ///< to the optimizer policy, block by block
};

/// @brief The route that the running backward asks for. @param edge  of the node, to the
/// parameter's accumulator. @param in_step  a step is open.
/// @throws ContractViolation if hooks are to see a gradient that a step would consume.
[[nodiscard]] inline GradientRoute route_of(const torch::autograd::Edge& edge, bool in_step) {
  if (!edge.is_valid()) return GradientRoute::drop;
  torch::autograd::Node& accumulator = *edge.function;
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked != nullptr && !asked->empty()) {
    const auto found = asked->find(&accumulator);
    if (found == asked->end() || !found->second.should_execute()) return GradientRoute::drop;
    if (found->second.captures_) return GradientRoute::engine;
  }
  const bool hooked = !accumulator.tensor_pre_hooks().empty() || !accumulator.pre_hooks().empty() ||
                      !accumulator.post_hooks().empty() ||
                      accumulator.tensor_post_acc_grad_hooks() != nullptr;
  if (in_step && hooked) {
    throw ContractViolation{
        "a parameter has hooks: run the backward outside of begin_step … end_step, then step()"};
  }
  if (hooked) return GradientRoute::engine;
  return in_step ? GradientRoute::update : GradientRoute::accumulate;
}

}  // namespace block_streamer::inline v1
