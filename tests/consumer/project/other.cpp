// SPDX-License-Identifier: Apache-2.0
#include "common.hpp"

#include <block_streamer/core/config.hpp>
#include <block_streamer/core/tensor_spec.hpp>
#include <block_streamer/io/progress_loop.hpp>

std::size_t bytes_in_other_unit() {
  return block_streamer::dense_byte_count(block_streamer::DType::f16, {5, 3}).value_or(0);
}
