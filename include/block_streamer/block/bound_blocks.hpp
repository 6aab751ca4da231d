// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/adapter_table.hpp>
#include <block_streamer/block/mutation_guard.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/view_cache.hpp>
#include <block_streamer/block/weight_binding.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The block list with everything that a visit indexes: bindings, views over slots,
/// adapters. Bound once.
/// **Threads.** Externally synchronised: the visiting thread's.
template <streamable_block Block>
class BoundBlocks {
 public:
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;

  BoundBlocks(std::vector<Block> blocks, at::Device device)
      : blocks_{std::move(blocks)},
        device_{device},
        views_{device},
        bindings_(blocks_.size()),
        layouts_(blocks_.size()),
        woven_(blocks_.size()) {
    for (const Block& block : blocks_) specs_.push_back(block.weight_specs());
  }

  /// @brief Matches every block with its layout, as it will lie when a visit begins.
  /// @throws BindingError naming block and tensors.
  template <class LayoutOf>
  void bind(LayoutOf&& layout_of) {
    dtype_.reset();
    views_ = ViewCache{device_};
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const BlockLayout& layout = layout_of(block_at(i));
      bindings_[i] = bind_weights(block_at(i), specs_[i], layout);
      layouts_[i] = views_.add(layout, bindings_[i].tensors);
      if (!dtype_) dtype_ = bindings_[i].dtype;
    }
  }
  /// @brief Weaves adapters in; an empty table takes them out.
  /// @throws ContractViolation if the table is not for this list.
  void weave(AdapterTable adapters) {
    expects(adapters.blocks.empty() || adapters.blocks.size() == blocks_.size(),
            "an adapter table has one entry per block");
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      woven_[i].clear();
      if (adapters.blocks.empty()) continue;
      const auto& by_weight = adapters.blocks[i].by_weight;
      expects(by_weight.empty() || by_weight.size() == specs_[i].size(),
              "an entry of an adapter table has one place per weight");
      for (const auto& adapter : by_weight) woven_[i].push_back(adapter.get());
    }
    adapters_ = std::move(adapters);
  }

  [[nodiscard]] std::size_t size() const noexcept { return blocks_.size(); }
  [[nodiscard]] std::span<const std::vector<WeightSpec>> specs() const noexcept { return specs_; }
  /// @brief The floating type of the weights as computed with, if they share one.
  [[nodiscard]] std::optional<DType> dtype() const noexcept { return dtype_; }
  [[nodiscard]] std::span<const at::Tensor> parameters(std::size_t block) const noexcept {
    return adapters_.blocks.empty() ? std::span<const at::Tensor>{}
                                    : adapters_.blocks[block].parameters;
  }
  /// @brief The lowest block with a trainable parameter; size() if nothing trains.
  [[nodiscard]] std::size_t lowest_trainable() const noexcept {
    std::size_t block = 0;
    const auto trains = [](const at::Tensor& parameter) { return parameter.requires_grad(); };
    while (block < size() && std::ranges::none_of(parameters(block), trains)) ++block;
    return block;
  }

  /// @brief Runs one block on the bytes of its visit.
  /// @throws ContractViolation if it changed its weights or its input in place; the slot's bytes
  /// are then spoilt.
  [[nodiscard]] Hidden run(BlockId block, std::span<std::byte> bytes, const Hidden& hidden,
                           Context& context, bool training) {
    const std::size_t i = index_of(block);
    views_.refilled(bytes);
    const std::span<const at::Tensor> weights = views_.views(bytes, layouts_[i]);
    guard_.arm(weights);
    const auto version = version_of(hidden);
    Hidden output = blocks_[i].forward(Weights{weights, woven_[i], training}, hidden, context);
    guard_.check(block, weights, bindings_[i].names);
    if (version_of(hidden) != version) {
      throw ContractViolation{"block " + std::to_string(i) +
                              " changed its input in place; clone it first"};
    }
    return output;
  }
  /// @brief Call when a visit spoilt its slot, or slots get new addresses.
  void forget_views(std::span<const std::byte> bytes) noexcept { views_.forget(bytes); }

 private:
  [[nodiscard]] static std::uint64_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<std::uint64_t>(tensor._version());
  }

  std::vector<Block> blocks_;
  at::Device device_;
  std::vector<std::vector<WeightSpec>> specs_;
  ViewCache views_;
  MutationGuard guard_;
  std::vector<WeightBinding> bindings_;
  std::vector<LayoutId> layouts_;
  AdapterTable adapters_;
  std::vector<std::vector<const ProjectionAdapter*>> woven_;
  std::optional<DType> dtype_;
};

}  // namespace block_streamer::inline v1
