// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/expects.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

namespace block_streamer::inline v1 {

namespace detail {

[[nodiscard]] constexpr float float_of_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(std::uint32_t{bits} << 16U);
}

[[nodiscard]] constexpr std::uint16_t bf16_of_float(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0;  // no number
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16U & 1U)) >> 16U);
}

[[nodiscard]] constexpr float float_of_f16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16U;
  const std::uint32_t exponent = bits >> 10U & 0x1fU;
  const std::uint32_t fraction = bits & 0x3ffU;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | fraction << 13U);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23U | fraction << 13U);
  const float tiny = static_cast<float>(fraction) * 0x1p-24F;  // exact: ten bits
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(tiny));
}

/// Rounds to the nearest, ties to even.
[[nodiscard]] constexpr std::uint16_t f16_of_float(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16U & 0x8000U);
  const std::uint32_t size = bits & 0x7fffffffU;
  if (size > 0x7f800000U) return sign | 0x7e00U;   // no number
  if (size >= 0x47800000U) return sign | 0x7c00U;  // from 2^16 on: infinite
  if (size < 0x33000000U) return sign;             // below 2^-25, half the least number
  std::uint32_t fraction = (size & 0x7fffffU) | 0x800000U;
  const std::uint32_t exponent = size >> 23U;
  // Below 2^-14 numbers have fewer digits, down to the fraction of 2^-24.
  const std::uint32_t dropped = exponent < 113 ? 126 - exponent : 13;
  const std::uint32_t half = std::uint32_t{1} << (dropped - 1);
  const std::uint32_t kept = fraction >> dropped;
  const std::uint32_t rest = fraction & (2 * half - 1);
  const std::uint32_t rounded =
      kept + ((rest > half || (rest == half && (kept & 1U) != 0)) ? 1 : 0);
  // A carry out of the fraction raises the exponent, as it should; up to infinity.
  const std::uint32_t base = exponent < 113 ? 0 : (exponent - 113) << 10U;
  return static_cast<std::uint16_t>(sign | (base + rounded));
}

template <class T>
[[nodiscard]] T load(const std::byte* from) noexcept {
  T value{};
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
void store(std::byte* to, T value) noexcept {
  std::memcpy(to, &value, sizeof value);
}

/// Number: float, or double if either side is f64. A detour through double would make it the
/// optimiser's choice whether a signalling NaN stays one.
template <class Number>
[[nodiscard]] Number load_float(DType type, const std::byte* from) noexcept {
  switch (type) {
    case DType::f16:
      return float_of_f16(load<std::uint16_t>(from));
    case DType::bf16:
      return float_of_bf16(load<std::uint16_t>(from));
    case DType::f32:
      return load<float>(from);
    default:
      return static_cast<Number>(load<double>(from));
  }
}

template <class Number>
void store_float(DType type, Number value, std::byte* to) noexcept {
  switch (type) {
    case DType::f16:
      return store(to, f16_of_float(static_cast<float>(value)));
    case DType::bf16:
      return store(to, bf16_of_float(static_cast<float>(value)));
    case DType::f32:
      return store(to, static_cast<float>(value));
    default:
      return store(to, static_cast<double>(value));
  }
}

template <class Number>
void convert_each(DType from_type, std::span<const std::byte> from, DType to_type,
                  std::span<std::byte> to) noexcept {
  const std::size_t from_size = byte_count_of(from_type);
  const std::size_t to_size = byte_count_of(to_type);
  for (std::size_t i = 0; i * from_size < from.size(); ++i) {
    store_float(to_type, load_float<Number>(from_type, from.data() + i * from_size),
                to.data() + i * to_size);
  }
}

}  // namespace detail

/// @brief True for f16, bf16, f32 and f64, the types that convert_floats() knows.
[[nodiscard]] constexpr bool is_convertible_float(DType type) noexcept {
  return type == DType::f16 || type == DType::bf16 || type == DType::f32 || type == DType::f64;
}

/// @brief Converts numbers as LibTorch's copies do: to the nearest, ties to even, f64 to a 16-bit
/// type by way of f32; what is no number stays none.
/// @pre both types are convertible; the spans hold equally many elements.
inline void convert_floats(DType from_type, std::span<const std::byte> from, DType to_type,
                           std::span<std::byte> to) {
  expects(is_convertible_float(from_type) && is_convertible_float(to_type),
          "F16, BF16, F32 and F64 can be converted");
  const std::size_t from_size = byte_count_of(from_type);
  const std::size_t to_size = byte_count_of(to_type);
  const std::size_t count = from.size() / from_size;
  expects(from.size() == count * from_size && to.size() == count * to_size,
          "both sides of a conversion hold equally many elements");
  const bool wide = from_type == DType::f64 || to_type == DType::f64;
  if (wide) return detail::convert_each<double>(from_type, from, to_type, to);
  detail::convert_each<float>(from_type, from, to_type, to);
}

}  // namespace block_streamer::inline v1
