// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/streamable_block.hpp>

#include <concepts>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A block of any type with one Hidden and one Context: for lists whose blocks differ.
/// Move-only. **Cost.** One allocation at construction, one virtual call a visit.
template <class HiddenType, class ContextType>
class AnyBlock {
 public:
  using Hidden = HiddenType;
  using Context = ContextType;

  template <class Block>
  requires(!std::same_as<Block, AnyBlock> && streamable_block<Block> &&
           std::same_as<typename Block::Hidden, Hidden> &&
           std::same_as<typename Block::Context, Context>)
      AnyBlock(Block block)  // NOLINT(google-explicit-constructor): a block converts
      : self_{std::make_unique<Model<Block>>(std::move(block))} {}

  [[nodiscard]] std::vector<WeightSpec> weight_specs() const { return self_->weight_specs(); }
  Hidden forward(const Weights& weights, const Hidden& hidden, Context& context) {
    return self_->forward(weights, hidden, context);
  }
  /// @brief What the block owns; tensors without bytes where it owns none.
  [[nodiscard]] std::vector<NamedTensor> masters() const { return self_->masters(); }
  void substitute(const Weights& weights) { self_->substitute(weights); }
  void restore() noexcept { self_->restore(); }
  [[nodiscard]] std::uint64_t mode() const { return self_->mode(); }

 private:
  struct Base {
    Base() = default;
    Base(const Base&) = delete;
    Base& operator=(const Base&) = delete;
    virtual ~Base() = default;
    [[nodiscard]] virtual std::vector<WeightSpec> weight_specs() const = 0;
    virtual Hidden forward(const Weights&, const Hidden&, Context&) = 0;
    [[nodiscard]] virtual std::vector<NamedTensor> masters() const = 0;
    virtual void substitute(const Weights&) = 0;
    virtual void restore() noexcept = 0;
    [[nodiscard]] virtual std::uint64_t mode() const = 0;
  };
  template <class Block>
  struct Model final : Base {
    explicit Model(Block b) : block{std::move(b)} {}
    [[nodiscard]] std::vector<WeightSpec> weight_specs() const override {
      return block.weight_specs();
    }
    Hidden forward(const Weights& weights, const Hidden& hidden, Context& context) override {
      return block.forward(weights, hidden, context);
    }
    [[nodiscard]] std::vector<NamedTensor> masters() const override {
      if constexpr (mastering_block<Block>) {
        return block.masters();
      } else {
        std::vector<NamedTensor> none;
        for (const WeightSpec& spec : block.weight_specs()) none.push_back({spec.name, {}});
        return none;
      }
    }
    void substitute([[maybe_unused]] const Weights& weights) override {
      if constexpr (substituting_block<Block>) block.substitute(weights);
    }
    void restore() noexcept override {
      if constexpr (substituting_block<Block>) block.restore();
    }
    [[nodiscard]] std::uint64_t mode() const override {
      if constexpr (moded_block<Block>) {
        return block.mode();
      } else {
        return 0;
      }
    }
    Block block;
  };
  std::unique_ptr<Base> self_;
};

}  // namespace block_streamer::inline v1
