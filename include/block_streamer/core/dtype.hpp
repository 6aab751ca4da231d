// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace block_streamer::inline v1 {

/// Element types that a stored tensor may have. Types narrower than a byte are not carried.
enum class DType : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  i64,
  u64,
  f64,
};

namespace detail {
struct DTypeInfo {
  std::string_view name;
  std::size_t byte_count;
};
/// Names as safetensors spells them, in the order of the enumeration.
inline constexpr std::array<DTypeInfo, 16> dtype_table{{{"BOOL", 1},
                                                        {"U8", 1},
                                                        {"I8", 1},
                                                        {"F8_E4M3", 1},
                                                        {"F8_E5M2", 1},
                                                        {"F8_E8M0", 1},
                                                        {"I16", 2},
                                                        {"U16", 2},
                                                        {"F16", 2},
                                                        {"BF16", 2},
                                                        {"I32", 4},
                                                        {"U32", 4},
                                                        {"F32", 4},
                                                        {"I64", 8},
                                                        {"U64", 8},
                                                        {"F64", 8}}};
}  // namespace detail

/// @brief Size of one element, in bytes.
[[nodiscard]] constexpr std::size_t byte_count_of(DType dtype) noexcept {
  return detail::dtype_table[static_cast<std::size_t>(dtype)].byte_count;
}

/// @brief The safetensors spelling, e.g. "BF16".
[[nodiscard]] constexpr std::string_view name_of(DType dtype) noexcept {
  return detail::dtype_table[static_cast<std::size_t>(dtype)].name;
}

/// @brief The type spelled so in a safetensors header; nullopt for an unknown or sub-byte one.
[[nodiscard]] constexpr std::optional<DType> parse_dtype(std::string_view name) noexcept {
  for (std::size_t i = 0; i < detail::dtype_table.size(); ++i) {
    if (detail::dtype_table[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

/// @brief True for f16, bf16, f32, f64 and the 8-bit floats.
[[nodiscard]] constexpr bool is_floating_point(DType dtype) noexcept {
  switch (dtype) {
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::f8_e8m0:
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64:
      return true;
    default:
      return false;
  }
}

}  // namespace block_streamer::inline v1
