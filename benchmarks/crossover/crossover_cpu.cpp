// SPDX-License-Identifier: Apache-2.0
#include "../support/host_side.hpp"
#include "crossover_benchmark.hpp"

namespace block_streamer_benchmarks {

void run_crossover_on_cpu(const CrossoverOptions& options, Report& report) {
  HostSide side;
  run_crossover(side, options, report);
}

}  // namespace block_streamer_benchmarks
