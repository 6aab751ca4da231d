// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/io/inline_loop.hpp>
#include <block_streamer/pipeline/pass.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scripted_tier.hpp"

namespace support {

/// Chunks of 1,000 bytes, four of which are staged; kernels run on the visitor's thread.
[[nodiscard]] inline bs::PipelineOptions small_options(std::uint32_t ahead) {
  bs::PipelineOptions options;
  options.prefetch_ahead = ahead;
  options.chunk_byte_count = 1000;
  options.staging_byte_count = 4096;
  options.computes_on_host = true;
  return options;
}

/// `count` blocks of one tensor of `size` bytes.
[[nodiscard]] inline std::vector<bs::BlockImage> plain_images(std::size_t count,
                                                              std::uint64_t size) {
  std::vector<bs::BlockImage> images(count);
  for (auto& image : images) {
    image.byte_count = size;
    image.segments = {{0, 0, size}};
    image.part_begin = {0, 1};
    image.layout.tensors = {{{"t", bs::DType::u8, {size}}, 0, 0, size}};
    image.layout.slot_byte_count = {size};
  }
  return images;
}

/// Runs one pass, checking the bytes of every visit; returns the number of wrong visits.
template <class Pipeline>
std::size_t run_pass(Pipeline& pipeline, const std::vector<bs::BlockImage>& images,
                     const bs::VisitOrder& order, const bs::VisitOrder& hint,
                     typename Pipeline::Stream& compute) {
  std::size_t wrong = 0;
  auto pass = pipeline.begin_pass(order, hint, compute);
  while (!pass.done()) {
    const auto lease = pass.acquire();
    const std::size_t block = bs::index_of(lease.part().block);
    wrong += slot_is_right(images[block], block, lease.bytes()) ? 0 : 1;
  }
  return wrong;
}

[[nodiscard]] inline std::uint64_t payload(const std::vector<bs::BlockImage>& images) {
  std::uint64_t bytes = 0;
  for (const auto& image : images) {
    for (const auto& segment : image.segments) bytes += segment.byte_count;
  }
  return bytes;
}

}  // namespace support
