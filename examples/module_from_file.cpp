// SPDX-License-Identifier: Apache-2.0
// Runs ordinary torch::nn modules whose weights stay in a file: no module has memory of its own,
// two at a time are in memory. Writes a small checkpoint first if there is none. Usage:
// module_from_file [FOLDER]
#include <block_streamer/block/module_block.hpp>
#include <block_streamer/block/stored_blocks.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/ops/gelu.h>
#include <ATen/ops/ones.h>

#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

namespace bs = block_streamer;

namespace {

constexpr int layer_count = 24;
constexpr std::int64_t width = 256;

/// A module as it would be written anywhere else.
struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(at::gelu(up->forward(x))); }
  torch::nn::Linear up{width, 4 * width}, down{4 * width, width};
};
TORCH_MODULE(Layer);

/// What training elsewhere would leave: one layer after another, as PyTorch names its tensors.
void write_checkpoint(const std::filesystem::path& path) {
  std::vector<at::Tensor> kept;
  std::vector<bs::TensorBytes> tensors;
  for (int i = 0; i < layer_count; ++i) {
    const Layer layer;
    for (const auto& parameter : layer->named_parameters()) {
      kept.push_back(parameter.value().detach());
      tensors.push_back({{"layers." + std::to_string(i) + "." + parameter.key(), bs::DType::f32,
                          bs::shape_of(kept.back())},
                         bs::bytes_of(kept.back())});
    }
  }
  std::filesystem::create_directories(path.parent_path());
  bs::write_safetensors(path, tensors);
}

void run(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / "model.safetensors"))
    write_checkpoint(folder / "model.safetensors");
  // [modules]
  auto checkpoint = bs::Checkpoint::open(folder);
  std::vector<bs::ModuleBlock<Layer>> blocks;
  for (int i = 0; i < layer_count; ++i) {
    Layer layer;
    bs::to_meta(*layer);  // names, shapes and types stay; the bytes are in the file
    blocks.emplace_back(layer);
  }
  auto map = bs::stored_blocks(checkpoint, blocks, "layers.{}.");  // every tensor checked, by name
  bs::Streamer streamer{blocks, bs::FileStorage{map}, bs::HostBackend{}, {.prefetch_ahead = 1}};
  at::Tensor y = streamer.forward(at::ones({8, width}));  // (B,C)
  // [/modules]
  std::uint64_t stored = 0;
  for (const bs::BlockSource& block : map.blocks()) stored += block.image.byte_count;
  std::printf("%d layers of %.1f MiB in the file, at most %.1f MiB in memory, mean %.4f\n",
              layer_count, static_cast<double>(stored) / 1048576.0,
              static_cast<double>(streamer.statistics().peak_resident_bytes) / 1048576.0,
              y.mean().item<double>());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? std::filesystem::path{argv[1]}
                 : std::filesystem::temp_directory_path() / "block_streamer_layers");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "module_from_file: %s\n", error.what());
    return 1;
  }
}
