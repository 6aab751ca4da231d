// SPDX-License-Identifier: Apache-2.0
// The main() of the programs, which take Google Benchmark's options beside their own.
#pragma once

#include "arguments.hpp"
#include "report.hpp"

#include <benchmark/benchmark.h>

#include <cstdio>
#include <exception>
#include <string>

namespace block_streamer_benchmarks {

/// @brief Hands Google Benchmark what is left of the command line. @returns false if it does not
/// know all of it.
[[nodiscard]] inline bool initialize_benchmark(Arguments& arguments) {
  auto rest = arguments.rest();
  int count = static_cast<int>(rest.size());
  benchmark::Initialize(&count, rest.data());
  return !benchmark::ReportUnrecognizedArguments(count, rest.data());
}

/// @brief What `run` returns; 1 with a line for what it throws.
template <class Run>
[[nodiscard]] int guarded_main(Run&& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

/// @brief A program that runs on a device or, with --device cpu, on the host.
/// @tparam Options  made of Arguments; says its `device`.
/// @param on_cuda   nullptr where the build has none. @param on_cpu_it  what the CPU run is good
/// for.
template <class Options>
[[nodiscard]] int device_main(int argc, char** argv, void (*on_cpu)(const Options&, Report&),
                              void (*on_cuda)(const Options&, Report&), const char* on_cpu_it) {
  return guarded_main([&] {
    Arguments arguments{argc, argv};
    const Options options{arguments};
    if (!initialize_benchmark(arguments)) return 2;
    const auto run = options.device == "cpu" ? on_cpu : on_cuda;
    if (run == nullptr) {
      std::printf("skipped: this build has no CUDA backend (--device cpu %s)\n", on_cpu_it);
      return 0;
    }
    Report report;
    run(options, report);
    report.print();
    return 0;
  });
}

}  // namespace block_streamer_benchmarks
