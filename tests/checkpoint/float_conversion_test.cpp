// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/float_conversion.hpp>

#include <array>
#include <cmath>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

/// The value of a 16-bit pattern by the definition of the format; infinities and no numbers apart.
double value_of(std::uint16_t bits, int fraction_bits, int bias) {
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double size =
      exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                    : std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  return (bits & 0x8000) != 0 ? -size : size;
}

struct Half {
  bs::DType type;
  int fraction_bits;
  int bias;
  std::uint16_t infinity;
};
constexpr std::array halves{Half{bs::DType::f16, 10, 15, 0x7c00},
                            Half{bs::DType::bf16, 7, 127, 0x7f80}};

template <class To, class From>
To convert(bs::DType from_type, From from, bs::DType to_type) {
  To to{};
  bs::convert_floats(from_type, std::as_bytes(std::span{&from, 1}), to_type,
                     std::as_writable_bytes(std::span{&to, 1}));
  return to;
}

}  // namespace

TEST_CASE("16-bit floats become 32-bit ones exactly and come back") {
  for (const Half& half : halves) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      const float wide = convert<float>(half.type, pattern, bs::DType::f32);
      if ((pattern & 0x7fff) > half.infinity) {
        if (!std::isnan(wide)) FAIL("no number became one: " << pattern);
        continue;
      }
      if ((pattern & 0x7fff) < half.infinity) {
        const double exact = value_of(pattern, half.fraction_bits, half.bias);
        if (exact != wide || std::signbit(exact) != std::signbit(wide)) FAIL("wrong: " << pattern);
      }
      const auto back = convert<std::uint16_t>(bs::DType::f32, wide, half.type);
      if (back != pattern) FAIL("came back as " << back << ": " << pattern);
    }
  }
}

TEST_CASE("32-bit floats are rounded to the nearest, ties to even") {
  for (const Half& half : halves) {
    for (std::uint16_t low = 0; low + 1 < half.infinity; ++low) {
      const double a = value_of(low, half.fraction_bits, half.bias);
      const double b = value_of(static_cast<std::uint16_t>(low + 1), half.fraction_bits, half.bias);
      const auto tie = static_cast<float>((a + b) / 2);
      const auto even = static_cast<std::uint16_t>(low + (low & 1));
      const auto rounded = [&](float value) {
        return convert<std::uint16_t>(bs::DType::f32, value, half.type);
      };
      const bool right = rounded(tie) == even && rounded(std::nextafter(tie, 0.0F)) == low &&
                         rounded(std::nextafter(tie, INFINITY)) == low + 1 &&
                         rounded(-tie) == (even | 0x8000);
      if (!right) FAIL("between " << a << " and " << b);
    }
  }
  CHECK(convert<std::uint16_t>(bs::DType::f32, 65519.0F, bs::DType::f16) == 0x7bff);
  CHECK(convert<std::uint16_t>(bs::DType::f32, 65520.0F, bs::DType::f16) == 0x7c00);
  CHECK(convert<std::uint16_t>(bs::DType::f32, -1e30F, bs::DType::f16) == 0xfc00);
  CHECK(convert<std::uint16_t>(bs::DType::f32, 3.4e38F, bs::DType::bf16) == 0x7f80);
  CHECK(std::isnan(bs::detail::float_of_f16(
      convert<std::uint16_t>(bs::DType::f32, std::nanf(""), bs::DType::f16))));
  CHECK(std::isnan(bs::detail::float_of_bf16(
      convert<std::uint16_t>(bs::DType::f32, std::nanf(""), bs::DType::bf16))));
}

TEST_CASE("64-bit floats and lists are converted element by element") {
  const std::array<double, 3> from{1.5, -0.1, 1e300};
  std::array<float, 3> to{};
  bs::convert_floats(bs::DType::f64, std::as_bytes(std::span{from}), bs::DType::f32,
                     std::as_writable_bytes(std::span{to}));
  CHECK(to == std::array<float, 3>{1.5F, -0.1F, INFINITY});
  CHECK(convert<double>(bs::DType::bf16, std::uint16_t{0x3fc0}, bs::DType::f64) == 1.5);
  std::array<float, 2> shorter{};
  CHECK_THROWS_AS(bs::convert_floats(bs::DType::f64, std::as_bytes(std::span{from}), bs::DType::f32,
                                     std::as_writable_bytes(std::span{shorter})),
                  bs::ContractViolation);
}
