// SPDX-License-Identifier: Apache-2.0
#include "../support/host_side.hpp"
#include "training_step_benchmark.hpp"

namespace block_streamer_benchmarks {

void run_training_step_on_cpu(const TrainingStepOptions& options, Report& report) {
  HostSide side;
  run_training_step(side, options, report);
}

}  // namespace block_streamer_benchmarks
