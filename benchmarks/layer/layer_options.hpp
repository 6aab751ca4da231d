// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/arguments.hpp"
#include "../support/report.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace block_streamer_benchmarks {

struct LayerOptions {
  explicit LayerOptions(Arguments& arguments)
      : device{arguments.text("--device", "cuda")},
        shape{arguments.text("--shape", "qwen3-8b")},
        tokens{numbers_in(arguments.text("--tokens", "128,2048,8192"), ',')},
        calls{std::max<std::size_t>(arguments.number("--calls", 8), 1)},
        rounds{std::max<std::size_t>(arguments.number("--rounds", 15), 1)} {}

  std::string device;                ///< cuda or cpu
  std::string shape;                 ///< see model_of()
  std::vector<std::int64_t> tokens;  ///< of one sequence, each a row
  std::size_t calls;                 ///< one after another between two looks at the clock
  std::size_t rounds;
};

/// @brief Runs everything on the CPU.
void run_layer_on_cpu(const LayerOptions& options, Report& report);
/// @brief The same on CUDA device 0. Only where the build has CUDA.
void run_layer_on_cuda(const LayerOptions& options, Report& report);

}  // namespace block_streamer_benchmarks
