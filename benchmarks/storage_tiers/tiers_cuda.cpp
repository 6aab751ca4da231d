// SPDX-License-Identifier: Apache-2.0
#include "tiers_benchmark.hpp"

#include <block_streamer/device/cuda_backend.hpp>

namespace block_streamer_benchmarks {

void run_tiers_on_cuda(const TiersOptions& options, Report& report) {
  if (const auto why = bs::CudaBackend::why_unusable()) {
    std::printf("skipped: no usable CUDA device: %s\n", why->c_str());
    return;
  }
  bs::CudaBackend backend{0};
  std::printf("device: %s\n", backend.properties().name.c_str());
  TiersBenchmark<bs::CudaBackend> tiers{backend, true, options, report};
  tiers.register_all();
  benchmark::RunSpecifiedBenchmarks();
}

}  // namespace block_streamer_benchmarks
