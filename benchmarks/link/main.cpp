// SPDX-License-Identifier: Apache-2.0
#include "link_options.hpp"

#include <benchmark/benchmark.h>

#include <cstdio>
#include <exception>

namespace {

int run(int argc, char** argv) {
  using namespace block_streamer_benchmarks;
  Arguments arguments{argc, argv};
  const LinkOptions options{arguments};
  auto rest = arguments.rest();
  int count = static_cast<int>(rest.size());
  benchmark::Initialize(&count, rest.data());
  if (benchmark::ReportUnrecognizedArguments(count, rest.data())) return 2;
  Report report;
  if (options.device == "cpu") {
    run_link_on_cpu(options, report);
  } else {
#ifdef BLOCK_STREAMER_HAS_CUDA
    run_link_on_cuda(options, report);
#else
    std::printf("skipped: this build has no CUDA backend (--device cpu tries the program out)\n");
    return 0;
#endif
  }
  report.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
