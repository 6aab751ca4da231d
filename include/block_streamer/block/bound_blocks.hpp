// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/adapter_table.hpp>
#include <block_streamer/block/block_result.hpp>
#include <block_streamer/block/masters.hpp>
#include <block_streamer/block/mutation_guard.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/view_cache.hpp>
#include <block_streamer/block/weight_binding.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// A weight of the visited block that trains: its gradient is that of the master.
struct TrainedWeight {
  at::Tensor leaf;  ///< over the bytes of the visit, in the type computed in
  std::uint32_t master = 0;
};

/// @brief The block list with everything that a visit indexes: bindings, views over slots,
/// adapters, and what trains. Bound once.
/// **Threads.** Externally synchronised: the visiting thread's.
template <streamable_block Block>
class BoundBlocks {
 public:
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;

  /// @param masters  what the blocks' storage was made of, if it trains; else null.
  BoundBlocks(std::vector<Block> blocks, at::Device device,
              std::shared_ptr<const Masters> masters = nullptr)
      : blocks_{std::move(blocks)},
        device_{device},
        masters_{std::move(masters)},
        bound_{ViewCache{device}, {}, {}, {}},
        woven_(blocks_.size()) {
    if (masters_ != nullptr && masters_->block_count() != size()) {
      throw ContractViolation{"the storage has as many blocks as the list (masters of " +
                              std::to_string(masters_->block_count()) + " stored, " +
                              std::to_string(size()) +
                              " blocks listed); a list that was moved away is empty"};
    }
    for (const Block& block : blocks_) specs_.push_back(block.weight_specs());
    list_parameters();
  }

  /// Every block with its layout. @see match
  struct Bound {
    ViewCache views;
    std::vector<WeightBinding> bindings;
    std::vector<LayoutId> layouts;
    std::optional<DType> dtype;
  };
  /// @brief Matches every block with its layout, as it will lie when a visit begins.
  /// @throws BindingError naming block and tensors.
  template <class LayoutOf>
  [[nodiscard]] Bound match(LayoutOf&& layout_of) const {
    Bound bound{ViewCache{device_}, {}, {}, {}};
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const BlockLayout& layout = layout_of(block_at(i));
      bound.bindings.push_back(bind_weights(block_at(i), specs_[i], layout));
      bound.layouts.push_back(bound.views.add(layout, bound.bindings.back().tensors));
      if (!bound.dtype) bound.dtype = bound.bindings.back().dtype;
    }
    return bound;
  }
  /// @brief Visits go by this from now on.
  void bind(Bound bound) noexcept { bound_ = std::move(bound); }
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
    list_parameters();
  }

  [[nodiscard]] std::size_t size() const noexcept { return blocks_.size(); }
  [[nodiscard]] std::span<const std::vector<WeightSpec>> specs() const noexcept { return specs_; }
  /// @brief The floating type of the weights as computed with, if they share one.
  [[nodiscard]] std::optional<DType> dtype() const noexcept { return bound_.dtype; }
  /// @brief What may train of a block: the masters that it is the first to use, then its adapters'.
  [[nodiscard]] std::span<const at::Tensor> parameters(std::size_t block) const noexcept {
    return parameters_[block];
  }
  /// @brief The masters among parameters(block), which come first.
  [[nodiscard]] std::span<const std::uint32_t> owned_masters(std::size_t block) const noexcept {
    return owned_[block];
  }
  [[nodiscard]] std::span<const at::Tensor> adapter_parameters(std::size_t block) const noexcept {
    return parameters(block).subspan(owned_[block].size());
  }
  /// @brief The lowest block with a trainable parameter; size() if nothing trains.
  [[nodiscard]] std::size_t lowest_trainable() const noexcept {
    std::size_t block = 0;
    const auto trains = [](const at::Tensor& parameter) { return parameter.requires_grad(); };
    while (block < size() && std::ranges::none_of(parameters(block), trains)) ++block;
    return block;
  }

  /// @brief Runs one block on the bytes of its visit. With grad mode on, trained() then has the
  /// weights that train. @see end_visit
  /// @param extras  if not null, receives what the block gives beside what flows.
  /// @throws ContractViolation if it changed its weights or its input in place; the slot's bytes
  /// are then spoilt.
  [[nodiscard]] Hidden run(BlockId block, std::span<std::byte> bytes, const Hidden& hidden,
                           Context& context, bool training,
                           std::vector<at::Tensor>* extras = nullptr) {
    const std::size_t i = index_of(block);
    end_visit();
    bound_.views.refilled(bytes);
    const std::span<const at::Tensor> weights =
        with_leaves(block, bound_.views.views(bytes, bound_.layouts[i]));
    const Weights lent{weights, woven_[i], training};
    if constexpr (substituting_block<Block>) {
      substituted_ = &blocks_[i];
      blocks_[i].substitute(lent);
    }
    guard_.arm(weights);
    const auto version = version_of(hidden);
    Hidden output = forward_with_extras(blocks_[i], lent, hidden, context, extras);
    guard_.check(block, weights, bound_.bindings[i].names);
    if (version_of(hidden) != version) {
      throw ContractViolation{"block " + std::to_string(i) +
                              " changed its input in place; clone it first"};
    }
    return output;
  }
  /// @brief How the block computes, where it has modes of its own.
  [[nodiscard]] std::uint64_t mode([[maybe_unused]] BlockId block) const {
    if constexpr (moded_block<Block>) {
      return blocks_[index_of(block)].mode();
    } else {
      return 0;
    }
  }
  /// @brief The weights of the running visit that train; empty without grad mode.
  [[nodiscard]] std::span<const TrainedWeight> trained() const noexcept { return trained_; }
  /// @brief Nothing computes on the visit's weights any more, its backward included. On every path.
  void end_visit() noexcept {
    if constexpr (substituting_block<Block>) {
      if (Block* const block = std::exchange(substituted_, nullptr)) block->restore();
    }
    trained_.clear();
    leaves_.clear();
  }
  /// @brief Call when a visit spoilt its slot, or slots get new addresses.
  void forget_views(std::span<const std::byte> bytes) noexcept { bound_.views.forget(bytes); }

 private:
  [[nodiscard]] static std::uint64_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<std::uint64_t>(tensor._version());
  }

  void list_parameters() {
    parameters_.assign(size(), {});
    owned_.assign(size(), {});
    for (std::size_t b = 0; b < size(); ++b) {
      if (masters_ != nullptr) {
        for (const std::uint32_t m : masters_->of(block_at(b))) {
          const Master& master = (*masters_)[m];
          if (index_of(master.owner) != b || !master.tensor.is_floating_point()) continue;
          owned_[b].push_back(m);
          parameters_[b].push_back(master.tensor);
        }
      }
      if (adapters_.blocks.empty()) continue;
      const auto& woven = adapters_.blocks[b].parameters;
      parameters_[b].insert(parameters_[b].end(), woven.begin(), woven.end());
    }
  }
  /// The views, those whose masters train replaced by leaves of the coming graph.
  [[nodiscard]] std::span<const at::Tensor> with_leaves(BlockId block,
                                                        std::span<const at::Tensor> views) {
    if (masters_ == nullptr || !c10::GradMode::is_enabled()) return views;
    const auto masters = masters_->of(block);
    const auto& order = bound_.bindings[index_of(block)].tensors;
    leaves_.assign(views.begin(), views.end());
    for (std::size_t i = 0; i < views.size(); ++i) {
      const std::uint32_t master = masters[order[i]];
      if (!(*masters_)[master].tensor.requires_grad()) continue;
      leaves_[i] = views[i].detach().set_requires_grad(true);
      trained_.push_back({leaves_[i], master});
    }
    return leaves_;
  }

  std::vector<Block> blocks_;
  at::Device device_;
  std::shared_ptr<const Masters> masters_;
  std::vector<std::vector<WeightSpec>> specs_;
  Bound bound_;
  MutationGuard guard_;
  AdapterTable adapters_;
  std::vector<std::vector<const ProjectionAdapter*>> woven_;
  std::vector<std::vector<at::Tensor>> parameters_;  ///< per block
  std::vector<std::vector<std::uint32_t>> owned_;    ///< per block: the first of them
  std::vector<at::Tensor> leaves_;                   ///< of the running visit, as weights
  std::vector<TrainedWeight> trained_;               ///< of the running visit
  Block* substituted_ = nullptr;                     ///< whose own tensors show a slot now
};

}  // namespace block_streamer::inline v1
