// SPDX-License-Identifier: Apache-2.0
#include "host_overhead.hpp"

#include <block_streamer/device/cuda_backend.hpp>

#include <exception>

namespace block_streamer_benchmarks {

void register_cuda_visits(Report& report) {
  if (const auto why = bs::CudaBackend::why_unusable()) {
    std::printf("skipped: no usable CUDA device: %s\n", why->c_str());
    return;
  }
  benchmark::RegisterBenchmark("visit/ram_4KiB/cuda",
                               [&report](benchmark::State& state) {
                                 try {
                                   const bs::CudaBackend backend{0};
                                   visit_tiny_blocks(state, report, "CUDA", backend,
                                                     bare_calls_s(backend));
                                 } catch (const std::exception& error) {
                                   report.failed("visit/ram_4KiB/cuda", error.what());
                                   state.SkipWithError(error.what());
                                 }
                               })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace block_streamer_benchmarks
