// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/core/block_layout.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Which stored tensor each weight of a block is, found once so that visits index.
/// Entry i belongs to entry i of weight_specs().
struct WeightBinding {
  std::vector<std::uint32_t> tensors;  ///< index into BlockLayout::tensors
  std::vector<std::string> names;      ///< for messages: relative to the block
  /// The one type of all floating weights; nullopt: none is floating, or they differ.
  std::optional<DType> dtype;
};

namespace detail {

inline std::string weight_problem(const WeightSpec& expected, const TensorSpec& stored) {
  std::string problems;
  if (stored.shape != expected.shape) {
    problems += "\n  " + expected.name + ": stored as " + to_string(stored.shape) +
                ", the block needs " + to_string(expected.shape);
  }
  if (expected.floating && !is_computable(stored.dtype)) {
    problems += "\n  " + expected.name + ": stored as " + std::string{name_of(stored.dtype)} +
                ", the block needs F16, BF16, F32 or F64";
  }
  if (expected.exact && *expected.exact != stored.dtype) {
    problems += "\n  " + expected.name + ": stored as " + std::string{name_of(stored.dtype)} +
                ", the block needs " + std::string{name_of(*expected.exact)};
  }
  return problems;
}

inline std::optional<std::uint32_t> index_in(const BlockLayout& layout, const std::string& name) {
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    if (layout.tensors[i].spec.name == name) return static_cast<std::uint32_t>(i);
  }
  return std::nullopt;
}

inline std::optional<DType> common_dtype(const BlockLayout& layout) {
  std::optional<DType> common;
  for (const TensorPlacement& tensor : layout.tensors) {
    if (!is_computable(tensor.spec.dtype)) continue;
    if (common && *common != tensor.spec.dtype) return std::nullopt;
    common = tensor.spec.dtype;
  }
  return common;
}

inline std::string unexpected_tensors(std::span<const WeightSpec> expected,
                                      const BlockLayout& layout) {
  std::string problems;
  for (const TensorPlacement& tensor : layout.tensors) {
    bool known = false;
    for (const WeightSpec& spec : expected) known = known || spec.name == tensor.spec.name;
    if (!known) {
      problems += "\n  " + tensor.spec.name + ": stored as " + to_string(tensor.spec.shape) +
                  ", unknown to the block";
    }
  }
  return problems;
}

}  // namespace detail

/// @brief Matches what a block expects against what is stored, strictly: every weight is there with
/// its shape, nothing else is.
/// @throws BindingError listing every missing, unexpected, wrongly shaped or wrongly typed tensor
/// of the block at once.
/// **Cost.** Quadratic in the number of tensors; once per block, never on a visit.
[[nodiscard]] inline WeightBinding bind_weights(BlockId block, std::span<const WeightSpec> expected,
                                                const BlockLayout& layout) {
  WeightBinding binding;
  std::string problems;
  for (const WeightSpec& spec : expected) {
    const auto index = detail::index_in(layout, spec.name);
    if (index) {
      problems += detail::weight_problem(spec, layout.tensors[*index].spec);
    } else {
      problems += "\n  " + spec.name + ": missing, the block needs " + to_string(spec.shape);
    }
    binding.tensors.push_back(index.value_or(0));
    binding.names.push_back(spec.name);
  }
  problems += detail::unexpected_tensors(expected, layout);
  if (!problems.empty()) {
    throw BindingError{"block " + std::to_string(index_of(block)) +
                       ": its stored tensors are not those that it computes with:" + problems};
  }
  binding.dtype = detail::common_dtype(layout);
  return binding;
}

}  // namespace block_streamer::inline v1
