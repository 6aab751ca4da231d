// SPDX-License-Identifier: Apache-2.0
#include "../support/cuda_side.hpp"
#include "crossover_benchmark.hpp"

#include <block_streamer/block/device_graph_cuda.hpp>

#include <cstdio>

namespace block_streamer_benchmarks {

void run_crossover_on_cuda(const CrossoverOptions& options, Report& report) {
  if (const auto why = bs::CudaBackend::why_unusable()) {
    std::printf("skipped: no usable CUDA device: %s\n", why->c_str());
    return;
  }
  CudaSide side;
  std::printf("device: %s\n", side.backend().properties().name.c_str());
  run_crossover(side, options, report);
}

}  // namespace block_streamer_benchmarks
