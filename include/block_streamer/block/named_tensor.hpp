// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace block_streamer::inline v1 {

/// A tensor under the name that its block or its file gives it: "fc1.weight".
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};
using NamedTensors = std::vector<NamedTensor>;

}  // namespace block_streamer::inline v1
