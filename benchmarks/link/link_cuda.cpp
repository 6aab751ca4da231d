// SPDX-License-Identifier: Apache-2.0
#include "../support/cuda_side.hpp"
#include "link_benchmark.hpp"

namespace block_streamer_benchmarks {

void run_link_on_cuda(const LinkOptions& options, Report& report) {
  if (const auto why = bs::CudaBackend::why_unusable()) {
    std::printf("skipped: no usable CUDA device: %s\n", why->c_str());
    return;
  }
  CudaSide side;
  std::printf("device: %s\n", side.backend().properties().name.c_str());
  run_link(side, options, report);
}

}  // namespace block_streamer_benchmarks
