// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/dtype.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace block_streamer::inline v1 {

/// Sizes of a tensor's dimensions, row-major. Empty: a scalar (one element). A zero: no element.
using Shape = std::vector<std::uint64_t>;

/// @brief Number of elements; nullopt where 64 bits do not hold it.
[[nodiscard]] inline std::optional<std::uint64_t> element_count(const Shape& shape) noexcept {
  std::uint64_t count = 1;
  for (const std::uint64_t size : shape) {
    if (size == 0) return 0;
  }
  for (const std::uint64_t size : shape) {
    const auto next = checked_multiply(count, size);
    if (!next) return std::nullopt;
    count = *next;
  }
  return count;
}

/// @brief Bytes of a dense tensor; nullopt where 64 bits do not hold them.
[[nodiscard]] inline std::optional<std::uint64_t> dense_byte_count(DType dtype,
                                                                   const Shape& shape) noexcept {
  const auto count = element_count(shape);
  return count ? checked_multiply(*count, byte_count_of(dtype)) : std::nullopt;
}

/// @brief "[3, 4]"; "[]" for a scalar.
[[nodiscard]] inline std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

/// What a tensor is called and how it is shaped. Inside a block, `name` is relative to the block:
/// "self_attn.q_proj.weight".
struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

}  // namespace block_streamer::inline v1
