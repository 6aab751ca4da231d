// SPDX-License-Identifier: Apache-2.0
// Trains a stack of ordinary torch::nn modules of which the device holds two at a time: the weights
// stay in host memory, and so do the gradients and what the optimizer keeps. Run it without
// arguments.
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/block/module_block.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/ops/gelu.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

namespace bs = block_streamer;

namespace {

constexpr std::int64_t width = 128;

/// A module as it would be written anywhere else.
struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(at::gelu(up->forward(norm->forward(x))));
  }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({width})};
  torch::nn::Linear up{width, 4 * width}, down{4 * width, width};
};
TORCH_MODULE(Mlp);

double mebibytes(std::uint64_t byte_count) {
  return static_cast<double>(byte_count) / 1048576.0;
}

void run() {
  torch::manual_seed(1);
  // [stream]
  std::vector<bs::ModuleBlock<Mlp>> blocks;
  for (int i = 0; i < 24; ++i) blocks.emplace_back(Mlp{});

  // The modules' own tensors are what streams: no second copy. On a GPU: bs::CudaBackend{0}, and x
  // and y on that device.
  bs::Streamer streamer{blocks, bs::ram_storage_of(blocks), bs::HostBackend{}};
  streamer.train();
  torch::optim::AdamW optimizer{streamer.parameters(), torch::optim::AdamWOptions{1e-3}};
  // [/stream]

  const at::Tensor x = at::randn({256, width});  // (B,C)
  const at::Tensor y = at::sin(3 * x);           // (B,C)
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    // [step]
    optimizer.zero_grad();
    const at::Tensor loss = at::mse_loss(streamer.forward(x), y);
    loss.backward();  // fetches the blocks again, in reverse; gradients leave block by block
    optimizer.step();
    // [/step]
    last = loss.item<double>();
    if (step == 0) first = last;
  }

  std::uint64_t weights = 0;
  for (const at::Tensor& parameter : streamer.parameters()) weights += parameter.nbytes();
  std::printf("weights %.1f MiB, resident at most %.1f MiB in %llu blocks\n", mebibytes(weights),
              mebibytes(streamer.statistics().peak_resident_bytes),
              static_cast<unsigned long long>(streamer.statistics().peak_resident_blocks));
  std::printf("loss %.4f -> %.4f in 20 steps\n", first, last);
  if (!(last < 0.5 * first)) throw bs::Error{"the loss did not halve"};
}

}  // namespace

int main() {
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "torch_module: %s\n", error.what());
    return 1;
  }
}
