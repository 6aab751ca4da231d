// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/no_context.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A function as a block, with the tensors that it computes with, or none: an activation
/// between two modules, a layer written out by hand.
/// @tparam ContextType  what all blocks of a pass share.
/// **Lifetime.** Shares the tensors.
template <class ContextType = NoContext>
class FunctionBlock {
 public:
  using Hidden = at::Tensor;
  using Context = ContextType;
  using Function = std::function<at::Tensor(const Weights&, const at::Tensor&, Context&)>;

  /// @param tensors   in the order in which the function indexes Weights.
  /// @param function  pure: it is called again in a backward. @see streamable_block
  FunctionBlock(std::vector<NamedTensor> tensors, Function function)
      : tensors_{std::move(tensors)}, function_{std::move(function)} {
    expects(function_ != nullptr, "a function block has a function");
    for (const NamedTensor& named : tensors_)
      expects(named.tensor.defined(), "the tensors of a function block are defined");
  }
  /// @brief A block without tensors.
  explicit FunctionBlock(std::function<at::Tensor(const at::Tensor&)> function)
      : function_{[of_hidden = std::move(function)](const Weights&, const at::Tensor& hidden,
                                                    Context&) { return of_hidden(hidden); }} {}

  [[nodiscard]] std::vector<WeightSpec> weight_specs() const { return specs_of(tensors_); }
  [[nodiscard]] std::vector<NamedTensor> masters() const { return tensors_; }
  [[nodiscard]] at::Tensor forward(const Weights& weights, const at::Tensor& hidden,
                                   Context& context) {
    return function_(weights, hidden, context);
  }

 private:
  std::vector<NamedTensor> tensors_;
  Function function_;
};
static_assert(mastering_block<FunctionBlock<>>);

}  // namespace block_streamer::inline v1
