// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/weights.hpp>

#include <memory>
#include <vector>

namespace block_streamer::inline v1 {

/// What is woven into one block: an adapter per weight index (null: none) and the tensors that
/// train.
struct BlockAdapters {
  std::vector<std::unique_ptr<ProjectionAdapter>> by_weight;  ///< empty, or one entry per weight
  std::vector<at::Tensor> parameters;  ///< leaf tensors on the compute device, requires_grad
};

/// One entry per block of the list. Built once at binding; a streamer holds it and visits index it.
struct AdapterTable {
  std::vector<BlockAdapters> blocks;
};

}  // namespace block_streamer::inline v1
