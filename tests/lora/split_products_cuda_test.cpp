// SPDX-License-Identifier: Apache-2.0
// Which products of a low-rank term are taken on a CUDA device, and what they are worth. Skips,
// saying why, where there is no device.
#include <block_streamer/block/projection.hpp>
#include <block_streamer/block/projection_node.hpp>
#include <block_streamer/lora/lora_projection.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

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
  bs::LowRankTerm term{a, b, /*scale=*/0.5};

  void run(const at::Tensor& x, const at::Tensor& gradient) {
    const std::array<bs::detail::LinearMap, 1> maps{{{weight, {}, &term}}};
    std::array<at::Tensor, 1> output;
    bs::detail::apply_maps_as_typed(maps, x, /*training=*/true, output);
    output[0].backward(gradient);
  }
};

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

TEST_CASE("cuda: low-rank terms of many bf16 rows are as exact as their fp32 factors") {
  if (!support::cuda_usable()) return;
  const auto half = at::TensorOptions{}.dtype(at::kBFloat16).device(support::cuda);
  const auto wide = [](const at::Tensor& x) { return x.detach().to(at::kDouble); };
  const auto distance = [&](const at::Tensor& found, const at::Tensor& expected) {
    return ((wide(found) - expected).norm() / expected.norm()).item<double>();
  };
  const double scale = 2;
  const at::Tensor weight = at::randn({384, 256}, half).mul_(0.05);
  for (const std::int64_t rows : {100, 1024, 1500}) {
    const at::Tensor x = at::randn({1, rows, 256}, half).set_requires_grad(true);
    const at::Tensor a = at::randn({16, 256}, half.dtype(at::kFloat)).set_requires_grad(true);
    const at::Tensor b = at::randn({384, 16}, half.dtype(at::kFloat)).set_requires_grad(true);
    const bs::LoraProjection lora{a, b, scale, 0};
    const std::vector<at::Tensor> weights{weight};
    const std::vector<const bs::ProjectionAdapter*> adapters{&lora};
    const at::Tensor y = bs::project(bs::Weights{weights, adapters, true}, 0, x);
    const at::Tensor gradient = at::randn(y.sizes(), half);
    y.backward(gradient);

    const at::Tensor flat = wide(x).view({rows, 256}), g = wide(gradient).view({rows, 384});
    const at::Tensor low = flat.mm(wide(a).t()), of_low = g.mm(wide(b)) * scale;
    INFO(rows << " rows");
    CHECK(distance(a.grad(), of_low.t().mm(flat)) < 5e-5);  // factors in bf16 would be 2e-3 away
    CHECK(distance(b.grad(), g.t().mm(low) * scale) < 5e-5);
    const at::Tensor expected = flat.mm(wide(weight).t()) + low.mm(wide(b).t()) * scale;
    CHECK(distance(y.view({rows, 384}), expected) < 3e-3);  // two roundings to bf16
    CHECK(distance(x.grad().view({rows, 256}), g.mm(wide(weight)) + of_low.mm(wide(a))) < 3e-3);
  }
}
