// SPDX-License-Identifier: Apache-2.0
#include "../support/host_side.hpp"
#include "decode_benchmark.hpp"

namespace block_streamer_benchmarks {

void run_decode_on_cpu(const DecodeOptions& options, Report& report) {
  HostSide side;
  run_decode(side, options, report);
}

}  // namespace block_streamer_benchmarks
