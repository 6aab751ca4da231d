// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "random_model.hpp"

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_block.hpp>
#include <block_streamer/models/decoder_model.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

/// Where the weights of a RandomDecoder come from.
struct RandomDecoderOptions {
  std::string shape;             ///< see model_of()
  std::size_t layers = 0;        ///< 0: as the shape has
  std::filesystem::path folder;  ///< a checkpoint there is read, or written first; empty: no files
};

/// @brief A decoder of random bf16 weights, without embedding and head: its blocks in the RAM tier,
/// and, for comparison, resident on the device. Each is made when first needed.
template <class Side>
class RandomDecoder {
 public:
  using Block = bs::models::DecoderBlock;
  using Tensors = std::vector<at::Tensor>;

  RandomDecoder(Side& side, RandomDecoderOptions options)
      : side_{side},
        options_{std::move(options)},
        config_{model_of(options_.shape, options_.layers)} {
    for (std::size_t i = 0; i < config_.layer_count; ++i) {
      blocks_.emplace_back(config_, i);
      lora_blocks_.push_back({bs::decoder_block_prefix(i), blocks_.back().weight_specs()});
    }
  }

  [[nodiscard]] const bs::ModelConfig& config() const noexcept { return config_; }
  [[nodiscard]] std::vector<Block>& blocks() noexcept { return blocks_; }
  [[nodiscard]] const std::vector<bs::LoraBlock>& lora_blocks() const noexcept {
    return lora_blocks_;
  }

  [[nodiscard]] bs::RamStorage& storage() {
    if (storage_) return *storage_;
    const std::filesystem::path& folder = options_.folder;
    if (folder.empty()) {
      storage_.emplace(random_blocks(config_));
    } else {
      if (!std::filesystem::exists(folder / "model.safetensors.index.json")) {
        bs::RamStorage written = random_blocks(config_);
        write_checkpoint(folder, written);
      }
      storage_.emplace(load_checkpoint(folder, config_));
    }
    return *storage_;
  }
  [[nodiscard]] std::uint64_t block_bytes() {
    return storage().image(bs::BlockId{0}).layout.slot_byte_count[0];
  }
  [[nodiscard]] std::uint64_t all_bytes() { return block_bytes() * config_.layer_count; }

  [[nodiscard]] const bs::LoraAdapter& adapter() {
    if (!adapter_) {
      bs::LoraOptions options;  // rank 16, all linear maps
      adapter_ = bs::make_lora_adapter(lora_blocks_, options, side_.device());
      const c10::NoGradGuard no_grad;  // B is zero at first: A would get no gradient
      for (const bs::LoraModule& module : adapter_->modules()) {
        const at::Tensor b = at::randn(module.b.sizes(), at::detail::createCPUGenerator(3),
                                       at::TensorOptions{}.dtype(at::kFloat));
        at::Tensor leaf = module.b;
        leaf.copy_(b.mul(0.01));
      }
    }
    return *adapter_;
  }
  [[nodiscard]] std::vector<Tensors>& resident() {
    if (!resident_.empty()) return resident_;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      Tensors& weights = resident_.emplace_back();
      const bs::BlockLayout& layout = storage().image(bs::block_at(i)).layout;
      for (const bs::WeightSpec& spec : blocks_[i].weight_specs()) {
        const bs::TensorPlacement& place = *layout.find(spec.name);
        const at::Tensor host = bs::view_of(storage().writable_bytes(bs::block_at(i), place),
                                            place.spec, at::Device{at::kCPU});
        weights.push_back(host.to(side_.device(), host.scalar_type(), false, /*copy=*/true));
      }
    }
    return resident_;
  }
  [[nodiscard]] at::Tensor input(std::int64_t tokens, std::int64_t batch = 1) const {
    return at::randn({batch, tokens, static_cast<std::int64_t>(config_.hidden_size)},
                     at::detail::createCPUGenerator(1), at::TensorOptions{}.dtype(at::kFloat))
        .to(side_.device(), at::kBFloat16);  // (B,T,C)
  }
  [[nodiscard]] bs::models::DecoderContext context(std::int64_t tokens,
                                                   std::int64_t batch = 1) const {
    const at::Tensor frequencies = bs::models::rotary_frequencies_of(config_).to(side_.device());
    return bs::models::make_context(batch, tokens, frequencies, at::kBFloat16);
  }
  [[nodiscard]] at::Tensor run_resident(const at::Tensor& x, bs::models::DecoderContext& c,
                                        const bs::AdapterTable* table) {
    return bs::resident_forward<Block>(blocks_, resident(), x, c, table, table != nullptr);
  }
  void forget_gradients() {
    for (const at::Tensor& p : adapter().parameters()) p.mutable_grad() = at::Tensor{};
  }
  /// Bytes a second of plain copies of all blocks out of the tier's own, page-locked memory.
  [[nodiscard]] double link_rate() {
    side_.synchronize();
    auto probe = side_.probe(block_bytes());
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < config_.layer_count; ++i)
      probe.copy(storage().bytes(bs::block_at(i)), i % 2);
    probe.finish();
    const double time =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return static_cast<double>(all_bytes()) / time;
  }

 private:
  Side& side_;
  RandomDecoderOptions options_;
  bs::ModelConfig config_;
  std::vector<Block> blocks_;
  std::vector<bs::LoraBlock> lora_blocks_;
  std::optional<bs::RamStorage> storage_;
  std::vector<Tensors> resident_;
  std::optional<bs::LoraAdapter> adapter_;
};

}  // namespace block_streamer_benchmarks
