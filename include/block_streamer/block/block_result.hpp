// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/streamable_block.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {
template <class T>
inline constexpr bool is_tensor_tuple = false;
template <std::same_as<at::Tensor>... Tensors>
requires(sizeof...(Tensors) >
         0) inline constexpr bool is_tensor_tuple<std::tuple<Tensors...>> = true;
}  // namespace detail

/// @brief A block that gives more than what flows on. Of a list's last block a streamer returns all
/// of it; of the others what flows on.
/// - `Result`: a tuple of tensors, the first of which flows on; others may be undefined.
/// - `forward_whole(weights, hidden, context)`: as `forward`, which gives the first of them.
template <class B>
concept resulting_block = streamable_block<B> && detail::is_tensor_tuple<typename B::Result> &&
    requires(B& block, const Weights& weights, const typename B::Hidden& hidden,
             typename B::Context& context) {
  { block.forward_whole(weights, hidden, context) } -> std::same_as<typename B::Result>;
};

namespace detail {
template <class Block>
struct BlockResult {
  using Type = typename Block::Hidden;
  static constexpr std::size_t extra_count = 0;
};
template <resulting_block Block>
struct BlockResult<Block> {
  using Type = typename Block::Result;
  static constexpr std::size_t extra_count = std::tuple_size_v<Type> - 1;
};
}  // namespace detail

/// What a list of such blocks returns: Hidden, or the block's Result.
template <streamable_block Block>
using ResultOf = typename detail::BlockResult<Block>::Type;

/// How many tensors a block's result has beside what flows.
template <streamable_block Block>
inline constexpr std::size_t extra_count_of = detail::BlockResult<Block>::extra_count;

/// @brief Runs a block. @param extras  if not null, receives what its result has beside what flows.
template <streamable_block Block>
[[nodiscard]] typename Block::Hidden forward_with_extras(Block& block, const Weights& weights,
                                                         const typename Block::Hidden& hidden,
                                                         typename Block::Context& context,
                                                         std::vector<at::Tensor>* extras) {
  if constexpr (resulting_block<Block>) {
    if (extras != nullptr) {
      return std::apply(
          [&](typename Block::Hidden first, auto... others) {
            extras->assign({std::move(others)...});
            return first;
          },
          block.forward_whole(weights, hidden, context));
    }
  }
  return block.forward(weights, hidden, context);
}

/// @brief The inverse: what flowed and the extras as one result.
template <streamable_block Block>
[[nodiscard]] ResultOf<Block> whole_result(typename Block::Hidden hidden,
                                           std::vector<at::Tensor> extras) {
  if constexpr (resulting_block<Block>) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      return ResultOf<Block>{std::move(hidden), std::move(extras[i])...};
    }
    (std::make_index_sequence<extra_count_of<Block>>{});
  } else {
    return hidden;
  }
}

}  // namespace block_streamer::inline v1
