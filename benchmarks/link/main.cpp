// SPDX-License-Identifier: Apache-2.0
#include "../support/main.hpp"
#include "link_options.hpp"

int main(int argc, char** argv) {
  using namespace block_streamer_benchmarks;
#ifdef BLOCK_STREAMER_HAS_CUDA
  constexpr auto on_cuda = run_link_on_cuda;
#else
  constexpr void (*on_cuda)(const LinkOptions&, Report&) = nullptr;
#endif
  return device_main<LinkOptions>(argc, argv, run_link_on_cpu, on_cuda, "tries the program out");
}
