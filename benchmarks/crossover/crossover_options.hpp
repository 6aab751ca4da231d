// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/arguments.hpp"
#include "../support/report.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace block_streamer_benchmarks {

struct CrossoverOptions {
  explicit CrossoverOptions(Arguments& arguments)
      : device{arguments.text("--device", "cuda")},
        widths{numbers_in(arguments.text("--widths", "128,256,512,1024,4096"), ',')},
        tokens{numbers_in(arguments.text("--tokens", "32,2048,8192"), ',')},
        runs{std::max<std::size_t>(arguments.number("--runs", 20), 1)},
        warmup{arguments.number("--warmup", 5)},
        prefetch_ahead{static_cast<std::uint32_t>(arguments.number("--prefetch-ahead", 1))} {
    const auto positive = [](std::int64_t n) { return n > 0; };
    if (!std::ranges::all_of(widths, positive) || !std::ranges::all_of(tokens, positive))
      throw std::invalid_argument{"--widths and --tokens are positive numbers"};
    std::ranges::sort(widths);
    std::ranges::sort(tokens);
  }

  std::string device;                ///< cuda, or cpu: a detached host backend, without graphs
  std::vector<std::int64_t> widths;  ///< ascending
  std::vector<std::int64_t> tokens;  ///< ascending
  std::size_t runs;                  ///< passes of each mode that count, the modes in turn
  std::size_t warmup;                ///< before them
  std::uint32_t prefetch_ahead;      ///< of the streamed passes; one slot more
};

/// @brief Runs the grid on a detached host backend.
void run_crossover_on_cpu(const CrossoverOptions& options, Report& report);
/// @brief The same on CUDA device 0. Only where the build has CUDA.
void run_crossover_on_cuda(const CrossoverOptions& options, Report& report);

}  // namespace block_streamer_benchmarks
