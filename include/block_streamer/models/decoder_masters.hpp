// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/core/dtype.hpp>
#include <block_streamer/models/decoder_model.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace block_streamer::inline v1::models {

/// @brief The weights of all blocks as tensors that train, in host memory: what a MasterStorage is
/// made of. Per block, in the order of its weight_specs() and under their names.
/// @param dtype  of the masters, whatever the stored type; blocks may compute in another.
/// **Cost.** The blocks in that type, and 4 MiB.
[[nodiscard]] inline std::vector<NamedTensors> load_block_masters(const DecoderModel& model,
                                                                  DType dtype = DType::f32) {
  std::vector<NamedTensors> masters;
  const std::vector<DecoderBlock> blocks = model.blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    NamedTensors& block = masters.emplace_back();
    for (const WeightSpec& spec : blocks[i].weight_specs()) {
      at::Tensor master =
          load_tensor(model.checkpoint(), model.layout().blocks[i].prefix + spec.name, dtype);
      block.push_back({spec.name, master.set_requires_grad(true)});
    }
  }
  return masters;
}

/// @brief The masters of all blocks in one list, under their names in the checkpoint: block by
/// block, as a streamer's parameters().
[[nodiscard]] inline NamedTensors with_full_names(const DecoderModel& model,
                                                  const std::vector<NamedTensors>& masters) {
  NamedTensors all;
  for (std::size_t i = 0; i < masters.size(); ++i) {
    for (const auto& [name, tensor] : masters[i])
      all.push_back({model.layout().blocks[i].prefix + name, tensor});
  }
  return all;
}

}  // namespace block_streamer::inline v1::models
