// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/block/split_products.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>

#include <cstdint>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

at::Tensor random(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  return at::randn({rows, columns}, at::detail::createCPUGenerator(seed), at::kFloat);
}
/// Of the largest value.
double error_of(const at::Tensor& got, const at::Tensor& exact) {
  return ((got.to(at::kDouble) - exact).abs().max() / exact.abs().max()).item<double>();
}
at::Tensor exact_product(const at::Tensor& a, const at::Tensor& b) {
  return at::matmul(a.to(at::kDouble), b.to(at::kDouble));
}

}  // namespace

TEST_CASE("a fp32 matrix in two bf16 parts keeps 16 bits, in one it keeps 8") {
  const at::Tensor matrix = random(40, 30, 1);
  const bs::detail::SplitMatrix split{matrix};
  CHECK(split.high.scalar_type() == at::kBFloat16);
  CHECK(split.low.scalar_type() == at::kBFloat16);
  const at::Tensor both = split.high.to(at::kDouble) + split.low.to(at::kDouble);
  const at::Tensor relative = ((both - matrix) / matrix).abs().max();
  CHECK(relative.item<double>() <= 1.0 / (1 << 16));
  CHECK(error_of(split.high, matrix.to(at::kDouble)) > 1.0 / (1 << 11));
}

TEST_CASE("products of bf16 rows with split factors are those of fp32 factors") {
  const at::Tensor rows = random(64, 48, 2).to(at::kBFloat16);
  const at::Tensor factor = random(48, 6, 3), narrow = random(64, 6, 4);
  constexpr double tolerance = 2e-5;  // one bf16 part alone: 1e-3
  CHECK(error_of(bs::detail::times_factor(rows, factor), exact_product(rows, factor)) < tolerance);
  CHECK(error_of(bs::detail::times_factor(rows, factor.to(at::kBFloat16).to(at::kFloat)),
                 exact_product(rows, factor)) > 10 * tolerance);
  CHECK(error_of(bs::detail::narrow_times_rows(narrow, rows), exact_product(narrow.t(), rows)) <
        tolerance);
}

TEST_CASE("a split product is added scaled, and rounded once") {
  const at::Tensor narrow = random(64, 6, 5), factor = random(6, 48, 6);
  at::Tensor sum = random(64, 48, 7).to(at::kBFloat16);
  const at::Tensor exact = sum.to(at::kDouble) + exact_product(narrow, factor) * 0.5;
  bs::detail::add_times_factor(sum, narrow, factor, 0.5);
  CHECK(sum.scalar_type() == at::kBFloat16);
  CHECK(error_of(sum, exact) < 1.0 / (1 << 8));
}

TEST_CASE("rows on the host are not split") {
  const at::Tensor factor = random(48, 6, 8);
  CHECK_FALSE(bs::detail::is_split(random(2048, 48, 9).to(at::kBFloat16), factor));
}
