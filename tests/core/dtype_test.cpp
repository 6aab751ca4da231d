// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/dtype.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("every dtype's name parses back to itself") {
  for (int i = 0; i <= static_cast<int>(bs::DType::f64); ++i) {
    const auto dtype = static_cast<bs::DType>(i);
    CHECK(bs::parse_dtype(bs::name_of(dtype)) == dtype);
  }
}

TEST_CASE("sizes and kinds") {
  CHECK(bs::byte_count_of(bs::DType::bf16) == 2);
  CHECK(bs::byte_count_of(bs::DType::f64) == 8);
  CHECK(bs::byte_count_of(bs::DType::f8_e8m0) == 1);
  CHECK(bs::is_floating_point(bs::DType::bf16));
  CHECK_FALSE(bs::is_floating_point(bs::DType::u8));
}

TEST_CASE("unknown and sub-byte names are not types") {
  CHECK_FALSE(bs::parse_dtype("F6_X").has_value());
  CHECK_FALSE(bs::parse_dtype("F4").has_value());
  CHECK_FALSE(bs::parse_dtype("bf16").has_value());
  CHECK_FALSE(bs::parse_dtype("").has_value());
}
