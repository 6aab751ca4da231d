// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/arguments.hpp"
#include "../support/report.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace block_streamer_benchmarks {

struct TrainingStepOptions {
  explicit TrainingStepOptions(Arguments& arguments)
      : device{arguments.text("--device", "cuda")},
        shape{arguments.text("--shape", "qwen3-8b")},
        layers{arguments.number("--layers", 0)},
        vocabulary{static_cast<std::int64_t>(arguments.number("--vocabulary", 151936))},
        tokens{numbers_in(arguments.text("--tokens", "128,2048,8192,32768"), ',')},
        micro_batches{numbers_in(arguments.text("--micro-batches", "8x2048"), 'x')},
        cached{numbers_in(arguments.text("--cached", "0"), ',')},
        activations{arguments.text("--activations", "device")},
        full_shape{arguments.text("--full-shape", "qwen3-1.7b")},
        full_tokens{static_cast<std::int64_t>(arguments.number("--full-tokens", 2048))},
        rounds{std::max<std::size_t>(arguments.number("--rounds", 5), 1)} {}

  std::string device;  ///< cuda, or cpu: a detached host backend, to try the program out
  std::string shape;   ///< see model_of()
  std::size_t layers;  ///< 0: as the shape has
  std::int64_t vocabulary;
  std::vector<std::int64_t> tokens;         ///< of a step, each a row
  std::vector<std::int64_t> micro_batches;  ///< how many together, tokens of each
  std::vector<std::int64_t> cached;         ///< blocks beyond the two slots, each a row
  std::string activations;                  ///< device or ram: where the blocks' inputs wait
  std::string full_shape;                   ///< of the step that trains all parameters; "none": not
  std::int64_t full_tokens;
  std::size_t rounds;  ///< probe, parts and step alternate so often
};

/// @brief Runs everything on a detached host backend.
void run_training_step_on_cpu(const TrainingStepOptions& options, Report& report);
/// @brief The same on CUDA device 0. Only where the build has CUDA.
void run_training_step_on_cuda(const TrainingStepOptions& options, Report& report);

}  // namespace block_streamer_benchmarks
