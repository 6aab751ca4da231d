// SPDX-License-Identifier: Apache-2.0
#include "../support/main.hpp"
#include "layer_options.hpp"

int main(int argc, char** argv) {
  using namespace block_streamer_benchmarks;
#ifdef BLOCK_STREAMER_HAS_CUDA
  constexpr auto on_cuda = run_layer_on_cuda;
#else
  constexpr void (*on_cuda)(const LayerOptions&, Report&) = nullptr;
#endif
  return device_main<LayerOptions>(argc, argv, run_layer_on_cpu, on_cuda, "tries the program out");
}
