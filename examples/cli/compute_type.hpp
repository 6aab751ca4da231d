// SPDX-License-Identifier: Apache-2.0
// What a model computes in.
#pragma once

#include "console.hpp"

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/dtype.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

namespace block_streamer_cli {
namespace detail {

/// Whether the processor multiplies bf16 itself, by the system's list of its features.
[[nodiscard]] inline bool has_native_bf16() {
  std::ifstream in{"/proc/cpuinfo"};
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    line += ' ';
    for (const std::string_view feature : {" avx512_bf16 ", " amx_bf16 ", " bf16 "}) {
      if (line.find(feature) != std::string::npos) return true;
    }
    return false;
  }
  return false;
}

/// Seconds of a linear map of the model's MLP over one token and over 64, the fastest of some runs.
[[nodiscard]] inline double probe_linear(const block_streamer::ModelConfig& config,
                                         at::ScalarType type) {
  constexpr std::int64_t most_rows = 4096;  // of a large model a part is enough
  const auto options = at::TensorOptions{}.dtype(type);
  const auto in = static_cast<std::int64_t>(config.hidden_size);
  const auto out = std::min(static_cast<std::int64_t>(config.intermediate_size), most_rows);
  const at::Tensor weight = at::ones({out, in}, options);
  double total = 0;
  for (const std::int64_t tokens : {1, 64}) {
    const at::Tensor input = at::ones({tokens, in}, options);
    double fastest = 1e9;
    for (int run = 0; run < 5; ++run) {
      const auto started = std::chrono::steady_clock::now();
      static_cast<void>(at::linear(input, weight));
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - started;
      fastest = std::min(fastest, spent.count());
    }
    total += fastest;
  }
  return total;
}

[[nodiscard]] inline block_streamer::DType auto_type_on_cpu(
    const block_streamer::ModelConfig& config, block_streamer::DType stored) {
  using block_streamer::DType;
  if (stored == DType::f32) {
    say("dtype: fp32 (auto: as stored)");
    return DType::f32;
  }
  if (!has_native_bf16()) {
    say("dtype: fp32 (auto: this processor has no bf16 of its own)");
    return DType::f32;
  }
  const c10::NoGradGuard no_grad;
  const double full = probe_linear(config, at::kFloat);
  const double half = probe_linear(config, at::kBFloat16);
  const bool faster = half < full;
  say(std::string{"dtype: "} + (faster ? "bf16" : "fp32") + " (auto: a probe took " +
      readable_number(half * 1e3, 2) + " ms in bf16, " + readable_number(full * 1e3, 2) +
      " ms in fp32)");
  return faster ? DType::bf16 : DType::f32;
}

}  // namespace detail

/// @brief Resolves --dtype; auto says what it chose and why.
[[nodiscard]] inline block_streamer::DType choose_compute_type(
    const std::string& wanted, const block_streamer::ModelConfig& config,
    const block_streamer::Checkpoint& checkpoint, at::Device device) {
  using block_streamer::DType;
  if (wanted == "bf16") return DType::bf16;
  if (wanted == "fp16") return DType::f16;
  if (wanted == "fp32") return DType::f32;
  const DType stored = checkpoint.at(block_streamer::embedding_name).spec.dtype;
  if (device.is_cpu()) return detail::auto_type_on_cpu(config, stored);
  say("dtype: " + std::string{block_streamer::name_of(stored)} + " (auto: as stored)");
  return stored;
}

}  // namespace block_streamer_cli
