// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>
#include <block_streamer/core/tensor_spec.hpp>

#include <cstdint>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// Where one tensor lies in the slot of its part.
struct TensorPlacement {
  TensorSpec spec;
  std::uint32_t part = 0;
  std::uint64_t slot_offset = 0;  ///< in bytes, a multiple of tensor_alignment
  std::uint64_t byte_count = 0;
};

/// Slot space of a block: which tensors it holds and where each lies once resident.
struct BlockLayout {
  std::vector<TensorPlacement> tensors;
  std::vector<std::uint64_t> slot_byte_count{0};  ///< per part, the end of the last tensor

  /// @brief The tensor of that name relative to the block, or nullptr. **Cost.** linear; for
  /// binding only.
  [[nodiscard]] const TensorPlacement* find(std::string_view name) const noexcept {
    for (const TensorPlacement& tensor : tensors) {
      if (tensor.spec.name == name) return &tensor;
    }
    return nullptr;
  }
};

}  // namespace block_streamer::inline v1
