// SPDX-License-Identifier: Apache-2.0
#include "../support/cuda_side.hpp"
#include "layer_benchmark.hpp"

#include <cstdio>

namespace block_streamer_benchmarks {

void run_layer_on_cuda(const LayerOptions& options, Report& report) {
  if (const auto why = bs::CudaBackend::why_unusable()) {
    std::printf("skipped: no usable CUDA device: %s\n", why->c_str());
    return;
  }
  CudaSide side;
  std::printf("device: %s\n", side.backend().properties().name.c_str());
  run_layer(side, options, report);
}

}  // namespace block_streamer_benchmarks
