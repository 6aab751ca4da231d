// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/config.hpp>
#include <block_streamer/core/tensor_spec.hpp>
#include <block_streamer/io/progress_loop.hpp>

#include <cstdio>

#include "common.hpp"

namespace bs = block_streamer;

int main() {
  const auto bytes = bs::dense_byte_count(bs::DType::bf16, {3, 5});
  bool right = bytes == 30 && bytes_in_other_unit() == 30;
#ifdef CONSUMER_WITH_block_streamer
  right = right && bytes_with_torch() == 30;
#endif
#ifdef CONSUMER_WITH_cuda
  right = right && cuda_runtime_answers();
#endif
#ifdef CONSUMER_WITH_torch_cuda
  right = right && torch_knows_cuda();
#endif
  std::printf("block_streamer %s: %s\n", bs::version_string.data(), right ? "works" : "is wrong");
  return right ? 0 : 1;
}
