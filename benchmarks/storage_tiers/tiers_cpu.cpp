// SPDX-License-Identifier: Apache-2.0
#include "tiers_benchmark.hpp"

#include <block_streamer/device/host_backend.hpp>

namespace block_streamer_benchmarks {

void run_tiers_on_cpu(const TiersOptions& options, Report& report) {
  TiersBenchmark<bs::HostBackend> tiers{bs::HostBackend{bs::HostMode::detached}, false, options,
                                        report};
  tiers.register_all();
  benchmark::RunSpecifiedBenchmarks();
}

}  // namespace block_streamer_benchmarks
