// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <block_streamer/block/weights.hpp>

#include <array>

#include "common.hpp"

std::size_t bytes_with_torch() {
  const std::array tensors{at::ones({3, 5}, at::kBFloat16)};
  const block_streamer::Weights weights{tensors};
  return weights[0].nbytes();
}
