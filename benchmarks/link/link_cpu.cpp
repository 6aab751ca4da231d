// SPDX-License-Identifier: Apache-2.0
#include "../support/host_side.hpp"
#include "link_benchmark.hpp"

namespace block_streamer_benchmarks {

void run_link_on_cpu(const LinkOptions& options, Report& report) {
  HostSide side;
  run_link(side, options, report);
}

}  // namespace block_streamer_benchmarks
