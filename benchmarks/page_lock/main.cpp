// SPDX-License-Identifier: Apache-2.0
#include "../support/main.hpp"
#include "page_lock_benchmark.hpp"

int main(int argc, char** argv) {
  using namespace block_streamer_benchmarks;
#ifdef BLOCK_STREAMER_HAS_CUDA
  constexpr auto on_cuda = run_page_lock_on_cuda;
#else
  constexpr void (*on_cuda)(const PageLockOptions&, Report&) = nullptr;
#endif
  return device_main<PageLockOptions>(argc, argv, run_page_lock_on_cpu, on_cuda,
                                      "only maps and touches");
}
