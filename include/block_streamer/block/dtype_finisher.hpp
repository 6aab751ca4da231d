// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/block/view_cache.hpp>
#include <block_streamer/core/block_layout.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The layout of a block after its floating tensors were converted to `target`, packed in
/// the same order. Integers and 8-bit floats are packed data: they keep their type.
[[nodiscard]] inline BlockLayout bound_layout(const BlockLayout& wire, DType target) {
  expects(is_computable(target), "the target of a conversion is F16, BF16, F32 or F64");
  BlockLayout bound{wire.tensors, std::vector<std::uint64_t>(wire.slot_byte_count.size(), 0)};
  for (TensorPlacement& tensor : bound.tensors) {
    if (is_computable(tensor.spec.dtype)) tensor.spec.dtype = target;
    const auto byte_count = dense_byte_count(tensor.spec.dtype, tensor.spec.shape);
    expects(byte_count.has_value(), "the size of tensor " + tensor.spec.name + " fits 64 bits");
    std::uint64_t& end = bound.slot_byte_count.at(tensor.part);
    tensor.byte_count = *byte_count;
    // Without elements: at 0, as any place after the last tensor may lie beyond the slot's end.
    tensor.slot_offset = tensor.byte_count == 0 ? 0 : round_up(end, tensor_alignment);
    end = std::max(end, tensor.slot_offset + tensor.byte_count);
  }
  return bound;
}

/// @brief Converts the tensors of one part from `wire` into `bound`, on LibTorch's current stream.
/// @pre both layouts have the same tensors in the same order, the spans hold their part.
/// **Cost.** One kernel per tensor; allocates views, so for single use: see DTypeFinisher.
inline void convert_block(std::span<const std::byte> wire, const BlockLayout& wire_layout,
                          std::span<std::byte> bound, const BlockLayout& bound_layout,
                          at::Device device, std::uint32_t part = 0) {
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < wire_layout.tensors.size(); ++i) {
    const TensorPlacement& from = wire_layout.tensors[i];
    const TensorPlacement& to = bound_layout.tensors[i];
    if (from.part != part) continue;
    // Only read: from_blob has no const form.
    auto* source = const_cast<std::byte*>(wire.subspan(from.slot_offset, from.byte_count).data());
    at::Tensor target = view_of(bound.subspan(to.slot_offset, to.byte_count), to.spec, device);
    target.copy_(view_of({source, from.byte_count}, from.spec, device));
  }
}

/// @brief The finisher that changes the floating type of a block between its slot and its use:
/// a checkpoint in BF16 computed in F32, say. Views are built once and reused.
/// **Threads.** The visiting thread's.
class DTypeFinisher {
 public:
  /// @param wire  the layouts of all blocks, by BlockId, as their tier delivers them.
  DTypeFinisher(std::span<const BlockLayout> wire, DType target, at::Device device)
      : wire_views_{device}, bound_views_{device} {
    for (const BlockLayout& layout : wire) {
      blocks_.push_back({bound_layout(layout, target), {}});
      for (std::uint32_t part = 0; part < layout.slot_byte_count.size(); ++part) {
        const auto order = tensors_of(layout, part);
        blocks_.back().parts.emplace_back(wire_views_.add(layout, order, part),
                                          bound_views_.add(blocks_.back().bound, order, part));
      }
    }
  }

  /// @brief The layout that the block computes with.
  [[nodiscard]] const BlockLayout& layout(BlockId block) const {
    return blocks_.at(index_of(block)).bound;
  }

  [[nodiscard]] std::uint64_t bound_byte_count(PartId part) const {
    return layout(part.block).slot_byte_count.at(part.part);
  }

  /// @brief Enqueues the conversion. @pre `stream` is LibTorch's current stream of the device.
  template <class Stream>
  void enqueue(PartId part, std::span<const std::byte> wire, std::span<std::byte> bound,
               [[maybe_unused]] Stream& stream) {
    const auto [from, to] = blocks_.at(index_of(part.block)).parts.at(part.part);
    // Only read: from_blob has no const form.
    const std::span<std::byte> source{const_cast<std::byte*>(wire.data()), wire.size()};
    const auto sources = wire_views_.views(source, from);
    const auto targets = bound_views_.views(bound, to);
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < sources.size(); ++i) targets[i].copy_(sources[i]);
  }

 private:
  struct Block {
    BlockLayout bound;
    std::vector<std::pair<LayoutId, LayoutId>> parts;  ///< wire, bound
  };

  static std::vector<std::uint32_t> tensors_of(const BlockLayout& layout, std::uint32_t part) {
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 0; i < layout.tensors.size(); ++i) {
      if (layout.tensors[i].part == part) order.push_back(i);
    }
    return order;
  }

  ViewCache wire_views_;
  ViewCache bound_views_;
  std::vector<Block> blocks_;
};

}  // namespace block_streamer::inline v1
