// SPDX-License-Identifier: Apache-2.0
// Which products of a low-rank term are taken on a CUDA device, and what they are worth. Skips,
// saying why, where there is no device.
#include <block_streamer/block/projection_node.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <cstdint>
#include <span>

#include <support/catch.hpp>
#include <support/cuda.hpp>

namespace bs = block_streamer;

namespace {

constexpr std::int64_t width = 512, rank = 8;

at::Tensor random(std::int64_t rows, std::int64_t columns, at::ScalarType dtype) {
  return at::randn({rows, columns}, at::TensorOptions().device(support::cuda)).to(dtype);
}

/// One map with a term, forward and backward.
struct Map {
  at::Tensor weight = random(width, width, at::kBFloat16) * 0.05;
  at::Tensor a = random(rank, width, at::kFloat).set_requires_grad(true);
  at::Tensor b = random(width, rank, at::kFloat).set_requires_grad(true);
  bs::detail::LowRankTerm term{a, b, /*scale=*/0.5};

  void run(const at::Tensor& x, const at::Tensor& gradient) {
    const std::array<bs::detail::LinearMap, 1> maps{{{weight, {}, &term}}};
    std::array<at::Tensor, 1> output;
    bs::detail::apply_maps_as_typed(maps, x, /*training=*/true, output);
    output[0].backward(gradient);
  }
};

double error_of(const at::Tensor& got, const at::Tensor& exact) {
  return ((got.to(at::kDouble) - exact).abs().max() / exact.abs().max()).item<double>();
}
std::int64_t peak_bytes() {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].peak;
}

}  // namespace

TEST_CASE("cuda: many bf16 rows meet fp32 factors without a copy of theirs in fp32") {
  if (!support::cuda_usable()) return;
  Map map;
  for (const auto& [rows, split] :
       {std::pair{std::int64_t{4096}, true}, {1024, true}, {1023, false}}) {
    at::Tensor x = random(rows, width, at::kBFloat16).set_requires_grad(true);
    const at::Tensor gradient = random(rows, width, at::kBFloat16);
    CHECK(bs::detail::is_split(x, map.a) == split);
    map.run(x, gradient);  // what is made once
    x.mutable_grad() = at::Tensor{};
    const std::int64_t before =
        c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    map.run(x, gradient);
    const std::int64_t row_bytes = rows * width * 2;
    // The output and the gradient of x, in bf16; factors and narrow products are a tenth of that.
    CHECK((peak_bytes() - before < 3 * row_bytes) == split);
  }
}

TEST_CASE("cuda: gradients of fp32 factors keep more than bf16 has") {
  if (!support::cuda_usable()) return;
  Map map;
  const at::Tensor x = random(2048, width, at::kBFloat16);
  const at::Tensor gradient = random(2048, width, at::kBFloat16);
  map.run(x, gradient);
  const at::Tensor wide_x = x.to(at::kDouble), wide_gradient = gradient.to(at::kDouble);
  const at::Tensor a = map.a.detach().to(at::kDouble), b = map.b.detach().to(at::kDouble);
  const at::Tensor of_a = at::matmul(at::matmul(wide_gradient, b).t(), wide_x) * 0.5;
  const at::Tensor of_b = at::matmul(wide_gradient.t(), at::matmul(wide_x, a.t())) * 0.5;
  CHECK(error_of(map.a.grad(), of_a) < 1e-4);  // factors in one bf16 part: 1e-3
  CHECK(error_of(map.b.grad(), of_b) < 1e-4);
}
