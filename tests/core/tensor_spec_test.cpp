// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/tensor_spec.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("b13 a scalar has one element, b12 a zero dimension has none") {
  CHECK(bs::element_count({}) == 1U);
  CHECK(bs::element_count({2, 0, 3}) == 0U);
  CHECK(bs::dense_byte_count(bs::DType::f32, {}) == 4U);
  CHECK(bs::dense_byte_count(bs::DType::bf16, {0}) == 0U);
}

TEST_CASE("b07 a shape product beyond 64 bits is refused, also beside a zero") {
  const std::uint64_t huge = 1ULL << 40;
  CHECK_FALSE(bs::element_count({huge, huge}).has_value());
  CHECK(bs::element_count({huge, huge, 0}) == 0U);
  CHECK_FALSE(bs::dense_byte_count(bs::DType::f64, {1ULL << 61}).has_value());
}

TEST_CASE("shapes print as users write them") {
  CHECK(bs::to_string(bs::Shape{3, 4}) == "[3, 4]");
  CHECK(bs::to_string(bs::Shape{}) == "[]");
}
