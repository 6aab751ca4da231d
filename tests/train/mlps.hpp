// SPDX-License-Identifier: Apache-2.0
// Small modules as users write them, and the same list run with all weights in memory.
#pragma once

#include <block_streamer/block/function_block.hpp>
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/block/module_block.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <torch/nn/modules/linear.h>

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <support/same_bits.hpp>

namespace support {
namespace bs = block_streamer;

constexpr std::int64_t width = 12;

/// x + W2·gelu(W1·x + b1); W1 may be frozen, W3 is registered but never used.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t inner = 20, double drop = 0)
      : up{torch::nn::LinearOptions(width, inner)},
        down{torch::nn::LinearOptions(inner, width).bias(false)},
        dropout{drop} {
    register_module("up", up);
    register_module("down", down);
    unused = register_parameter("unused", torch::zeros({3}));
    scale = register_buffer("scale", torch::full({1}, 0.5));
    calls = register_buffer("calls", torch::zeros({2}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = at::gelu(up->forward(x));  // (B,inner)
    if (dropout > 0) h = at::dropout(h, dropout, is_training());
    return x + down->forward(h) * scale;
  }
  torch::nn::Linear up, down;
  at::Tensor unused, scale, calls;
  double dropout;
};
TORCH_MODULE(Mlp);

/// The same values every time.
inline void fill(torch::nn::Module& module, std::uint64_t seed) {
  const c10::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& parameter : module.parameters())
    parameter.copy_(at::randn(parameter.sizes(), generator) * 0.4);
}

inline std::vector<Mlp> make_mlps(std::size_t count = 5, double dropout = 0) {
  std::vector<Mlp> modules;
  for (std::size_t i = 0; i < count; ++i) {
    modules.emplace_back(8 + 5 * static_cast<std::int64_t>(i), dropout);
    fill(*modules.back(), i);
  }
  return modules;
}

using MlpBlock = bs::ModuleBlock<Mlp>;
inline std::vector<MlpBlock> blocks_of(const std::vector<Mlp>& modules) {
  return {modules.begin(), modules.end()};
}

template <class Modules>
at::Tensor resident(Modules& modules, at::Tensor x) {
  for (auto& module : modules) x = module->forward(x);
  return x;
}

inline std::vector<at::Tensor> parameters_of(const std::vector<Mlp>& modules) {
  std::vector<at::Tensor> all;
  for (const Mlp& module : modules) {
    for (const auto& parameter : module->parameters()) all.push_back(parameter);
  }
  return all;
}

inline at::Tensor batch(std::uint64_t seed = 7) {
  return at::randn({6, width}, at::detail::createCPUGenerator(seed));
}

/// Both ways in which the host plays a device.
inline constexpr bs::HostMode modes[] = {bs::HostMode::attached, bs::HostMode::detached};

inline bs::StreamerOptions train_options(std::uint32_t ahead, bool cached = false) {
  bs::StreamerOptions options;
  options.prefetch_ahead = ahead;
  if (cached) options.device_budget = 6000;
  return options;
}

/// Streams them from RAM, in training mode.
[[nodiscard]] inline auto stream_mlps(const std::vector<Mlp>& modules, bs::HostMode mode,
                                      std::uint32_t ahead = 1) {
  auto blocks = blocks_of(modules);
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                        train_options(ahead)};
  streamer.train();
  return streamer;
}

inline bool same_gradients(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) same = same_bits(a[i].grad(), b[i].grad());
  return same;
}
inline bool same_values(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) same = same_bits(a[i], b[i]);
  return same;
}

}  // namespace support
