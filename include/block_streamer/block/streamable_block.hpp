// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/block/weights.hpp>
#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/tensor_spec.hpp>

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What a block expects of its storage, checked strictly against the stored tensors once.
struct WeightSpec {
  std::string name;  ///< relative to the block: "self_attn.q_proj.weight"
  Shape shape;
  bool projection = false;  ///< applied by project(): an adapter may be woven in (2-D, (out, in))
  bool floating = true;     ///< computed with: F16, BF16, F32 or F64; false: any type, e.g. packed
  std::optional<DType> exact{};  ///< stored as this type and no other
};

/// @brief One element of the ordered list.
/// - `Hidden`: what flows from block to block (at::Tensor). `Context`: what all blocks of a pass
/// share (positions, masks, KV
///   caches): one type, not a parameter pack.
/// - `weight_specs()`: called once, before the first pass; index i of Weights is entry i of it.
/// - `forward(weights, hidden, context)`: a pure function of weights, hidden and context; called
/// again in backward. A mutable
///   context (a KV cache) is legal only while grad mode is off. It enqueues on the current stream,
///   does not synchronize, may not keep or write weights. Exceptions pass through; the streamer
///   stays usable.
template <class B>
concept streamable_block = std::movable<B> &&
    requires(B& block, const B& constant_block, const Weights& weights,
             const typename B::Hidden& hidden, typename B::Context& context) {
  { constant_block.weight_specs() } -> std::same_as<std::vector<WeightSpec>>;
  { block.forward(weights, hidden, context) } -> std::same_as<typename B::Hidden>;
};

/// @brief The specs of a block that computes with tensors of its own.
[[nodiscard]] inline std::vector<WeightSpec> specs_of(std::span<const NamedTensor> tensors) {
  std::vector<WeightSpec> specs;
  for (const NamedTensor& own : tensors) {
    const bool floating = own.tensor.is_floating_point();
    specs.push_back({own.name, shape_of(own.tensor), false, floating});
    if (!floating) specs.back().exact = dtype_of(own.tensor.scalar_type());
  }
  return specs;
}

/// @brief A block that owns the tensors it computes with, in the order of its weight_specs():
/// undefined or meta ones where the bytes are elsewhere. @see ram_storage_of
template <class B>
concept mastering_block = streamable_block<B> && requires(const B& block) {
  { block.masters() } -> std::same_as<std::vector<NamedTensor>>;
};

/// @brief A block whose code reads tensors of its own instead of the Weights that it is given.
/// - `substitute(weights)`: from now on these tensors show the weights' bytes, and their uses count
///   as uses of the weights in the graph. Called before forward, once a visit.
/// - `restore()`: they are themselves again. Called at the end of the visit, that is after the
///   backward of a recompute, on every path.
template <class B>
concept substituting_block = streamable_block<B> && requires(B& block, const Weights& weights) {
  { block.substitute(weights) } -> std::same_as<void>;
  { block.restore() }
  noexcept->std::same_as<void>;
};

/// @brief A block whose code computes in modes of its own, such as parts in evaluation.
/// - `mode()`: says which; another number between a forward and its backward is an error.
template <class B>
concept moded_block = streamable_block<B> && requires(const B& block) {
  { block.mode() } -> std::same_as<std::uint64_t>;
};

}  // namespace block_streamer::inline v1
