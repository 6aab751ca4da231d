// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/arguments.hpp"
#include "../support/report.hpp"

#include <algorithm>
#include <cstdint>
#include <string>

namespace block_streamer_benchmarks {

struct DecodeOptions {
  explicit DecodeOptions(Arguments& arguments)
      : device{arguments.text("--device", "cuda")},
        shape{arguments.text("--shape", "qwen3-8b")},
        layers{arguments.number("--layers", 0)},
        vocabulary{static_cast<std::int64_t>(arguments.number("--vocabulary", 151936))},
        context{static_cast<std::int64_t>(arguments.number("--context", 128))},
        tokens{std::max<std::size_t>(arguments.number("--tokens", 4), 1)},
        batch{static_cast<std::int64_t>(std::max<std::size_t>(arguments.number("--batch", 8), 1))},
        rounds{std::max<std::size_t>(arguments.number("--rounds", 5), 1)} {}

  std::string device;  ///< cuda, or cpu: a detached host backend, to try the program out
  std::string shape;   ///< see model_of()
  std::size_t layers;  ///< 0: as the shape has
  std::int64_t vocabulary;
  std::int64_t context;  ///< tokens in the KV cache before the first that is timed
  std::size_t tokens;    ///< timed in a round
  std::int64_t batch;    ///< sequences of the last row
  std::size_t rounds;    ///< probe and run alternate so often
};

/// @brief Runs everything on a detached host backend.
void run_decode_on_cpu(const DecodeOptions& options, Report& report);
/// @brief The same on CUDA device 0. Only where the build has CUDA.
void run_decode_on_cuda(const DecodeOptions& options, Report& report);

}  // namespace block_streamer_benchmarks
