// SPDX-License-Identifier: Apache-2.0
#include "../support/host_side.hpp"
#include "layer_benchmark.hpp"

namespace block_streamer_benchmarks {

void run_layer_on_cpu(const LayerOptions& options, Report& report) {
  HostSide side;
  run_layer(side, options, report);
}

}  // namespace block_streamer_benchmarks
