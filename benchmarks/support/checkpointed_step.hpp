// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/adapter_table.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/weights.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <span>
#include <vector>

namespace block_streamer_benchmarks {

/// @brief Forward and backward with all weights in memory that keeps only the blocks' inputs and
/// computes each block again, as a streamed step does: the same work without any streaming.
/// @param loss  from the output to a scalar.
template <block_streamer::streamable_block Block>
void checkpointed_step(std::span<Block> blocks, std::span<const std::vector<at::Tensor>> weights,
                       const at::Tensor& input, typename Block::Context& context,
                       const block_streamer::AdapterTable& adapters,
                       const std::function<at::Tensor(const at::Tensor&)>& loss) {
  std::vector<const block_streamer::ProjectionAdapter*> woven;
  const auto run = [&](std::size_t i, const at::Tensor& x) {
    woven.clear();
    for (const auto& adapter : adapters.blocks[i].by_weight) woven.push_back(adapter.get());
    return blocks[i].forward(block_streamer::Weights{weights[i], woven, true}, x, context);
  };
  std::vector<at::Tensor> inputs{input};
  {
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < blocks.size(); ++i) inputs.push_back(run(i, inputs.back()));
  }
  at::Tensor output = inputs.back().detach().set_requires_grad(true);
  loss(output).backward();
  at::Tensor gradient = output.grad();
  for (std::size_t i = blocks.size(); i-- > 0;) {
    const at::Tensor x = inputs[i].detach().set_requires_grad(i > 0);
    run(i, x).backward(gradient);
    gradient = x.grad();
  }
}

}  // namespace block_streamer_benchmarks
