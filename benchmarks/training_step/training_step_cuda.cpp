// SPDX-License-Identifier: Apache-2.0
#include "../support/cuda_side.hpp"
#include "training_step_benchmark.hpp"

#include <block_streamer/block/device_graph_cuda.hpp>

#include <cstdio>

namespace block_streamer_benchmarks {

void run_training_step_on_cuda(const TrainingStepOptions& options, Report& report) {
  if (const auto why = bs::CudaBackend::why_unusable()) {
    std::printf("skipped: no usable CUDA device: %s\n", why->c_str());
    return;
  }
  CudaSide side;
  std::printf("device: %s\n", side.backend().properties().name.c_str());
  run_training_step(side, options, report);
}

}  // namespace block_streamer_benchmarks
