// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/arguments.hpp"
#include "../support/report.hpp"

#include <block_streamer/storage/read_threads.hpp>

#include <algorithm>
#include <cstdint>
#include <string>

namespace block_streamer_benchmarks {

struct TiersOptions {
  explicit TiersOptions(Arguments& arguments)
      : device{arguments.text("--device", "cuda")},
        shape{arguments.text("--shape", "qwen3-8b")},
        layers{arguments.number("--layers", 0)},
        folder{arguments.text("--folder", "storage-tiers-checkpoint")},
        warm{arguments.flag("--warm")},
        rounds{std::max<std::size_t>(arguments.number("--rounds", 5), 1)},
        chunk_kib{arguments.number("--chunk-kib", 0)},
        staging_mib{arguments.number("--staging-mib", 64)},
        prefetch_ahead{arguments.number("--prefetch-ahead", 1)},
        depth{arguments.number("--depth", 16)},
        request_kib{arguments.number("--request-kib", 4096)},
        threads{std::max<std::size_t>(
            arguments.number("--threads", block_streamer::default_read_threads()), 1)},
        probe_threads{std::max<std::size_t>(arguments.number("--probe-threads", 8), 1)},
        probe_kib{arguments.number("--probe-kib", 8192)} {}

  std::string device;     ///< cuda, or cpu: slots apart from storage, copied by a thread
  std::string shape;      ///< see model_of()
  std::size_t layers;     ///< 0: as the shape has
  std::string folder;     ///< where the checkpoint is, or will be written
  bool warm;              ///< out of the page cache instead of from the drive
  std::size_t rounds;     ///< probe and tier alternate so often
  std::size_t chunk_kib;  ///< 0: as the tier is best with
  std::size_t staging_mib;
  std::size_t prefetch_ahead;
  std::size_t depth;        ///< of the ring
  std::size_t request_kib;  ///< to the ring
  std::size_t threads;      ///< of the tiers that have some
  std::size_t probe_threads;
  std::size_t probe_kib;  ///< what a thread of the probe reads at once
};

/// @brief Every tier, read alone and streamed through a pipeline to a detached host backend.
void run_tiers_on_cpu(const TiersOptions& options, Report& report);
/// @brief The same to CUDA device 0. Only where the build has CUDA.
void run_tiers_on_cuda(const TiersOptions& options, Report& report);

}  // namespace block_streamer_benchmarks
