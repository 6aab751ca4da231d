// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/train/activation_usage.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A block's input as it waits for the backward: the tensor itself, or where its bytes are
/// and how they lay. Neither: the backward does not come down to that block.
struct SavedInput {
  at::Tensor kept;            ///< detached: shares memory and version counter with what flowed in
  std::uint32_t version = 0;  ///< of `kept` then
  ActivationMeter::Share share;  ///< of `kept`

  std::vector<std::int64_t> sizes, strides;
  at::TensorOptions options;
  std::uint64_t byte_count = 0;
  std::shared_ptr<std::byte> memory;           ///< in host memory, or
  std::shared_ptr<const std::uint64_t> begin;  ///< in the file

  [[nodiscard]] bool held() const noexcept {
    return kept.defined() || memory != nullptr || begin != nullptr;
  }
};

/// @brief A tensor whose bytes can be moved as they are and give the same tensor elsewhere, for
/// kernels that look at strides and alignment too.
[[nodiscard]] inline bool is_movable(const at::Tensor& tensor) {
  constexpr std::uintptr_t alignment = 64;  // that of LibTorch's allocators
  return tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         tensor.is_non_overlapping_and_dense() && !tensor.is_neg() && !tensor.is_conj() &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % alignment == 0;
}

/// @brief The bytes of a movable tensor, in the order in which they lie.
[[nodiscard]] inline std::span<std::byte> dense_bytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace block_streamer::inline v1
