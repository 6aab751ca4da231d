// SPDX-License-Identifier: Apache-2.0
// The scenarios, for any device. @see HostSide, CudaSide
#pragma once

#include "../support/random_decoder.hpp"
#include "../support/report.hpp"
#include "layer_options.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace block_streamer_benchmarks {

/// @brief One decoder layer with its weights on the device: nothing streams.
template <class Side>
class LayerBenchmark {
 public:
  LayerBenchmark(Side& side, const LayerOptions& options, Report& report)
      : side_{side}, options_{options}, report_{report}, decoder_{side, {options.shape, 1, {}}} {}

  void register_all() {
    for (const std::int64_t tokens : options_.tokens) {
      add("forward", tokens, [this](const at::Tensor& x, bs::models::DecoderContext& c) {
        const c10::NoGradGuard no_grad;
        (void)decoder_.run_resident(x, c, nullptr);
      });
      add("backward", tokens, [this](const at::Tensor& x, bs::models::DecoderContext& c) {
        both(x, c, bs::AdapterTable{std::vector<bs::BlockAdapters>(1)});
      });
      add("lora", tokens, [this](const at::Tensor& x, bs::models::DecoderContext& c) {
        both(x, c, decoder_.adapter().table(decoder_.lora_blocks()));
      });
    }
  }

 private:
  using Work = std::function<void(const at::Tensor&, bs::models::DecoderContext&)>;

  /// Forward and backward into the input, and the adapters' parameters where there are any.
  void both(const at::Tensor& x, bs::models::DecoderContext& c, const bs::AdapterTable& adapters) {
    const at::Tensor input = x.detach().set_requires_grad(true);
    decoder_.run_resident(input, c, &adapters).backward(x);
    decoder_.forget_gradients();
  }

  void add(const std::string& what, std::int64_t tokens, Work work) {
    const std::string name = "layer/" + what + "/1x" + std::to_string(tokens);
    register_once(report_, name, [=, this](benchmark::State& state) {
      const at::Tensor x = decoder_.input(tokens);
      auto context = decoder_.context(tokens);
      std::vector<double> times;
      for (std::size_t round = 0; round < options_.rounds + 2; ++round) {  // two warm
        side_.synchronize();
        const auto begin = std::chrono::steady_clock::now();
        for (std::size_t i = 0; i < options_.calls; ++i) work(x, context);
        side_.synchronize();
        const auto end = std::chrono::steady_clock::now();
        if (round >= 2) times.push_back(std::chrono::duration<double>(end - begin).count());
      }
      const double time = median(times) / static_cast<double>(options_.calls);
      state.SetIterationTime(time);
      report_.add(state, {name, time * 1e3, "ms"});
    });
  }

  Side& side_;
  LayerOptions options_;
  Report& report_;
  RandomDecoder<Side> decoder_;
};

/// @brief Registers the scenarios and runs what the command line selects.
template <class Side>
void run_layer(Side& side, const LayerOptions& options, Report& report) {
  LayerBenchmark<Side> scenarios{side, options, report};
  scenarios.register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::ClearRegisteredBenchmarks();
}

}  // namespace block_streamer_benchmarks
