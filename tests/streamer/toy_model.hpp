// SPDX-License-Identifier: Apache-2.0
// A small list of unlike blocks in a checkpoint of its own, and every way to store it.
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/projection.hpp>
#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <support/safetensors_files.hpp>

#include <support/same_bits.hpp>

namespace support {
namespace bs = block_streamer;

constexpr std::int64_t toy_width = 24;

struct ToyContext {
  double dropout = 0;
  std::function<void(std::size_t)> before_block;  ///< called by every block, e.g. to throw
};

/// x + W2·tanh(W1·x + b), of its own inner width; an inner width of 0: a block without parameters.
struct ToyBlock {
  using Hidden = at::Tensor;
  using Context = ToyContext;
  std::size_t index = 0;
  std::uint64_t inner = 0;

  std::vector<bs::WeightSpec> weight_specs() const {
    if (inner == 0) return {};
    return {{"up.weight", {inner, toy_width}, true},
            {"up.bias", {inner}},
            {"down.weight", {toy_width, inner}, true}};
  }
  at::Tensor forward(const bs::Weights& weights, const at::Tensor& x, ToyContext& context) {
    if (context.before_block) context.before_block(index);
    if (inner == 0) return at::tanh(x);
    at::Tensor h = at::tanh(bs::project(weights, 0, 1, x));  // (B,inner)
    if (context.dropout > 0) h = at::dropout(h, context.dropout, true);
    return x + bs::project(weights, 2, h);
  }
};
static_assert(bs::streamable_block<ToyBlock>);

/// The checkpoint with its folder, and what is made of it.
class ToyModel {
 public:
  explicit ToyModel(bs::DType dtype = bs::DType::f32,
                    std::vector<std::uint64_t> inner = {7, 40, 0, 129, 16, 64})
      : inner_{std::move(inner)} {
    auto generator = at::detail::createCPUGenerator(3);
    std::vector<at::Tensor> kept;
    std::vector<bs::TensorBytes> tensors;
    for (std::size_t i = 0; i < inner_.size(); ++i) {
      bs::BlockTensors names{"layers." + std::to_string(i) + ".", {}};
      for (const auto& spec : ToyBlock{i, inner_[i]}.weight_specs()) {
        names.names.push_back(spec.name);
        kept.push_back(
            (at::randn(bs::sizes_of(spec.shape), generator) * 0.3).to(bs::scalar_type_of(dtype)));
        tensors.push_back(
            {{names.prefix + spec.name, dtype, spec.shape}, bs::bytes_of(kept.back())});
      }
      names_.push_back(std::move(names));
    }
    bs::write_safetensors(folder_ / "model.safetensors", tensors, {});
    checkpoint_ = std::make_unique<bs::Checkpoint>(bs::Checkpoint::open(folder_.path()));
  }

  [[nodiscard]] std::size_t size() const { return inner_.size(); }
  [[nodiscard]] std::vector<ToyBlock> blocks() const {
    std::vector<ToyBlock> blocks;
    for (std::size_t i = 0; i < size(); ++i) blocks.push_back({i, inner_[i]});
    return blocks;
  }
  [[nodiscard]] bs::BlockMap map() const { return bs::make_block_map(*checkpoint_, names_); }
  [[nodiscard]] bs::AnyStorage storage(const std::string& tier) const {
    if (tier == "ram") return bs::RamStorage::load(map());
    if (tier == "mapped") return bs::MappedStorage{map()};
    return bs::FileStorage{map(), 2};
  }
  /// Every weight in memory, in the order of the specs, in `dtype` if given.
  [[nodiscard]] std::vector<std::vector<at::Tensor>> resident(
      std::optional<bs::DType> dtype = {}) const {
    std::vector<std::vector<at::Tensor>> all;
    for (std::size_t i = 0; i < size(); ++i) {
      all.emplace_back();
      for (const auto& name : names_[i].names)
        all.back().push_back(bs::load_tensor(*checkpoint_, names_[i].prefix + name, dtype));
    }
    return all;
  }
  [[nodiscard]] std::vector<bs::LoraBlock> lora_blocks() const {
    std::vector<bs::LoraBlock> blocks;
    for (std::size_t i = 0; i < size(); ++i) blocks.push_back({names_[i].prefix, blocks_specs(i)});
    return blocks;
  }
  /// An adapter whose B is not zero, so that every gradient is.
  [[nodiscard]] bs::LoraAdapter adapter(double top_fraction = 1, double dropout = 0,
                                        at::Device device = at::kCPU) const {
    bs::LoraOptions options;
    options.rank = 3;
    options.alpha = 6;
    options.dropout = dropout;
    options.top_fraction = top_fraction;
    auto adapter = bs::make_lora_adapter(lora_blocks(), options, device);
    auto generator = at::detail::createCPUGenerator(9);
    for (const auto& module : adapter.modules()) {
      const c10::NoGradGuard no_grad;
      module.b.copy_(at::randn(module.b.sizes(), generator) * 0.2);
    }
    return adapter;
  }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  [[nodiscard]] std::vector<bs::WeightSpec> blocks_specs(std::size_t i) const {
    return ToyBlock{i, inner_[i]}.weight_specs();
  }
  TempFolder folder_;
  std::vector<std::uint64_t> inner_;
  std::vector<bs::BlockTensors> names_;
  std::unique_ptr<bs::Checkpoint> checkpoint_;
};

template <class Backend>
using ToyStreamer = bs::Streamer<ToyBlock, bs::AnyStorage, bs::ExternalOptimizer, Backend>;

[[nodiscard]] inline bs::StreamerOptions toy_options(std::uint32_t ahead = 1,
                                                     std::uint64_t chunk = 1000) {
  bs::StreamerOptions options;
  options.prefetch_ahead = ahead;
  options.chunk_byte_count = chunk;
  options.staging_byte_count = 4 * chunk;
  return options;
}

[[nodiscard]] inline at::Tensor toy_input(at::ScalarType dtype = at::kFloat) {
  return at::randn({5, toy_width}, at::detail::createCPUGenerator(17)).to(dtype);
}

}  // namespace support
