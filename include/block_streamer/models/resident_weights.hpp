// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/models/decoder_model.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace block_streamer::inline v1::models {

/// @brief All weights of all blocks in memory, per block in the order of its weight_specs(): what
/// resident_forward() takes. They have the model's type and device. **Cost.** The whole model.
[[nodiscard]] inline std::vector<std::vector<at::Tensor>> resident_weights(
    const DecoderModel& model) {
  std::vector<std::vector<at::Tensor>> weights;
  const std::vector<DecoderBlock> blocks = model.blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::vector<at::Tensor>& block = weights.emplace_back();
    for (const WeightSpec& spec : blocks[i].weight_specs()) {
      block.push_back(load_tensor(model.checkpoint(), model.layout().blocks[i].prefix + spec.name,
                                  model.dtype(), model.device()));
    }
  }
  return weights;
}

}  // namespace block_streamer::inline v1::models
