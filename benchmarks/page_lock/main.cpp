// SPDX-License-Identifier: Apache-2.0
#include "page_lock_benchmark.hpp"

#include <benchmark/benchmark.h>

#include <cstdio>
#include <exception>

namespace {

int run(int argc, char** argv) {
  using namespace block_streamer_benchmarks;
  Arguments arguments{argc, argv};
  const PageLockOptions options{arguments};
  auto rest = arguments.rest();
  int count = static_cast<int>(rest.size());
  benchmark::Initialize(&count, rest.data());
  if (benchmark::ReportUnrecognizedArguments(count, rest.data())) return 2;
  Report report;
  if (options.device == "cpu") {
    run_page_lock_on_cpu(options, report);
  } else {
#ifdef BLOCK_STREAMER_HAS_CUDA
    run_page_lock_on_cuda(options, report);
#else
    std::printf("skipped: this build has no CUDA backend (--device cpu only maps and touches)\n");
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
