// SPDX-License-Identifier: Apache-2.0
#include "../support/main.hpp"
#include "tiers_options.hpp"

int main(int argc, char** argv) {
  using namespace block_streamer_benchmarks;
#ifdef BLOCK_STREAMER_HAS_CUDA
  constexpr auto on_cuda = run_tiers_on_cuda;
#else
  constexpr void (*on_cuda)(const TiersOptions&, Report&) = nullptr;
#endif
  return device_main<TiersOptions>(argc, argv, run_tiers_on_cpu, on_cuda, "streams to host memory");
}
