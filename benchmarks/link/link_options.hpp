// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/arguments.hpp"
#include "../support/report.hpp"

#include <algorithm>
#include <cstdint>
#include <string>

namespace block_streamer_benchmarks {

struct LinkOptions {
  explicit LinkOptions(Arguments& arguments)
      : device{arguments.text("--device", "cuda")},
        shape{arguments.text("--shape", "qwen3-8b")},
        layers{arguments.number("--layers", 0)},
        folder{arguments.text("--folder", "link-checkpoint")},
        in_memory{arguments.flag("--in-memory")},
        rounds{std::max<std::size_t>(arguments.number("--rounds", 7), 1)},
        short_tokens{static_cast<std::int64_t>(arguments.number("--short", 128))},
        long_tokens{static_cast<std::int64_t>(arguments.number("--long", 2048))},
        batch{static_cast<std::int64_t>(arguments.number("--batch", 8))} {}

  std::string device;  ///< cuda, or cpu: a detached host backend, to try the program out
  std::string shape;   ///< see model_of()
  std::size_t layers;  ///< 0: as the shape has
  std::string folder;  ///< where the checkpoint is, or will be written
  bool in_memory;      ///< no files: the tier is filled in memory
  std::size_t rounds;  ///< probe and run alternate so often
  std::int64_t short_tokens;
  std::int64_t long_tokens;
  std::int64_t batch;  ///< sequences of long_tokens in the forward that computing bounds
};

/// @brief Runs everything on a detached host backend.
void run_link_on_cpu(const LinkOptions& options, Report& report);
/// @brief The same on CUDA device 0. Only where the build has CUDA.
void run_link_on_cuda(const LinkOptions& options, Report& report);

}  // namespace block_streamer_benchmarks
