// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/adapter_table.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/weights.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Runs the list with all weights in memory: the reference that a streamed run equals bit
/// for bit, and the base line of the benchmarks. It binds tensors directly and knows no slot or
/// plan.
/// @param weights  per block, in the order of its weight_specs(); may require grad.
/// @param adapters  what is woven in, or null.
/// @param training  what Weights::training() says: dropout of adapters is active.
template <streamable_block Block>
[[nodiscard]] typename Block::Hidden resident_forward(
    std::span<Block> blocks, std::span<const std::vector<at::Tensor>> weights,
    typename Block::Hidden hidden, typename Block::Context& context,
    const AdapterTable* adapters = nullptr, bool training = false) {
  expects(blocks.size() == weights.size(), "every block has its weights");
  expects(adapters == nullptr || adapters->blocks.size() == blocks.size(),
          "the adapter table has one entry per block");
  std::vector<const ProjectionAdapter*> woven;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    woven.clear();
    if (adapters != nullptr) {
      for (const auto& adapter : adapters->blocks[i].by_weight) woven.push_back(adapter.get());
    }
    hidden = blocks[i].forward(Weights{weights[i], woven, training}, hidden, context);
  }
  return hidden;
}

}  // namespace block_streamer::inline v1
