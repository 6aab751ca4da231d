// SPDX-License-Identifier: Apache-2.0
// The streamer on a CUDA device. Skips, saying why, where there is none.
#include "toy_model.hpp"

#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/counting_backend.hpp>
#include <block_streamer/layers/attention.hpp>

#include <ATen/cuda/Sleep.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <support/catch.hpp>
#include <support/cuda.hpp>

#include <cmath>
#include <utility>

namespace bs = block_streamer;
using support::cuda;
using support::same_bits;
using support::ToyContext;
using support::ToyModel;

namespace {

struct Result {
  at::Tensor output, input_gradient;
  std::vector<at::Tensor> gradients;
};

bool equal(const Result& a, const Result& b) {
  const auto same = [](const at::Tensor& x, const at::Tensor& y) {
    return same_bits(x.cpu(), y.cpu());
  };
  bool all = same(a.output, b.output) && same(a.input_gradient, b.input_gradient);
  for (std::size_t i = 0; i < a.gradients.size(); ++i)
    all = all && same(a.gradients[i], b.gradients[i]);
  return all;
}

template <class Forward>
Result run(const bs::LoraAdapter& adapter, at::ScalarType dtype, Forward&& forward) {
  at::Tensor input = support::toy_input(dtype).to(cuda).set_requires_grad(true);
  for (const at::Tensor& p : adapter.parameters()) p.mutable_grad() = at::Tensor{};
  Result result{forward(input), {}, {}};
  result.output.to(at::kFloat).square().sum().backward();
  result.input_gradient = input.grad();
  for (const at::Tensor& p : adapter.parameters()) result.gradients.push_back(p.grad());
  return result;
}

std::vector<std::vector<at::Tensor>> on_device(const ToyModel& model) {
  auto weights = model.resident();
  for (auto& block : weights) {
    for (auto& weight : block) weight = weight.to(cuda);
  }
  return weights;
}

/// Kernels that take their time, so that a missing wait is seen.
ToyContext slow_context(std::int64_t cycles) {
  ToyContext context;
  context.before_block = [cycles](std::size_t) { at::cuda::sleep(cycles); };
  return context;
}

}  // namespace

TEST_CASE("cuda: streamed equals resident bit for bit, forward and gradients") {
  if (!support::cuda_usable()) return;
  std::size_t combinations = 0;
  for (const bs::DType dtype : {bs::DType::f32, bs::DType::bf16, bs::DType::f16}) {
    const ToyModel model{dtype};
    const auto adapter = model.adapter(1, 0, cuda);
    const auto table = adapter.table(model.lora_blocks());
    auto blocks = model.blocks();
    const auto weights = on_device(model);
    ToyContext context;
    const auto resident = [&] {
      return run(adapter, bs::scalar_type_of(dtype), [&](const at::Tensor& x) {
        return bs::resident_forward<support::ToyBlock>(blocks, weights, x, context, &table, true);
      });
    };
    const Result expected = resident();
    REQUIRE(equal(resident(), expected));
    for (const std::string tier : {"ram", "mapped", "file"}) {
      for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
        for (const std::uint64_t chunk : {std::uint64_t{1000}, std::uint64_t{1} << 20}) {
          support::ToyStreamer<bs::CudaBackend> streamer{model.blocks(), model.storage(tier),
                                                         bs::CudaBackend{0},
                                                         support::toy_options(ahead, chunk)};
          streamer.attach(adapter.table(model.lora_blocks()));
          streamer.train();
          for (int again = 0; again < 3; ++again) {
            const Result streamed =
                run(adapter, bs::scalar_type_of(dtype),
                    [&](const at::Tensor& x) { return streamer.forward(x, context); });
            INFO(tier << " ahead " << ahead << " chunk " << chunk << " " << bs::name_of(dtype));
            CHECK(equal(streamed, expected));
          }
          ++combinations;
        }
      }
    }
  }
  WARN(combinations << " combinations");
}

TEST_CASE("cuda: b72 b75 slow kernels, caller's own streams and a stream changed between calls") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  const auto adapter = model.adapter(1, 0, cuda);
  ToyContext plain;
  auto blocks = model.blocks();
  const auto table = adapter.table(model.lora_blocks());
  const auto weights = on_device(model);
  const Result expected = run(adapter, at::kFloat, [&](const at::Tensor& x) {
    return bs::resident_forward<support::ToyBlock>(blocks, weights, x, plain, &table, true);
  });
  for (const std::string tier : {"ram", "file"}) {
    support::ToyStreamer<bs::CudaBackend> streamer{model.blocks(), model.storage(tier),
                                                   bs::CudaBackend{0}, support::toy_options()};
    streamer.attach(adapter.table(model.lora_blocks()));
    streamer.train();
    ToyContext slow = slow_context(2'000'000);
    for (int again = 0; again < 10; ++again) {
      const auto stream =
          c10::cuda::getStreamFromPool();  // another one each time, not synchronised by us
      stream.synchronize();
      const c10::cuda::CUDAStreamGuard guard{stream};
      const Result streamed =
          run(adapter, at::kFloat, [&](const at::Tensor& x) { return streamer.forward(x, slow); });
      stream.synchronize();
      CHECK(equal(streamed, expected));
    }
  }
}

TEST_CASE("cuda: the vector clocks find every access of a step ordered") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CheckedBackend<bs::CudaBackend>;
  const ToyModel model;
  ToyContext context;
  for (const std::string tier : {"ram", "file"}) {
    Backend backend{bs::CudaBackend{0}};
    const bs::ViolationLog log = backend.log();
    {
      const auto adapter = model.adapter(1, 0, cuda);
      support::ToyStreamer<Backend> streamer{model.blocks(), model.storage(tier), backend,
                                             support::toy_options()};
      streamer.attach(adapter.table(model.lora_blocks()));
      streamer.train();
      for (int i = 0; i < 3; ++i)
        run(adapter, at::kFloat, [&](const at::Tensor& x) { return streamer.forward(x, context); });
    }
    INFO(to_string(log));
    CHECK(log.empty());
  }
}

TEST_CASE("cuda: a forward over frozen weights in RAM makes no synchronising call") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CountingBackend<bs::CudaBackend>;
  const ToyModel model;
  Backend backend{bs::CudaBackend{0}};
  support::ToyStreamer<Backend> streamer{model.blocks(), model.storage("ram"), backend,
                                         support::toy_options()};
  ToyContext context;
  const auto x = support::toy_input().to(cuda);
  (void)streamer.forward(x, context);
  const auto before = backend.counts().synchronizes.load() + backend.counts().queries.load() +
                      backend.counts().notifies.load();
  const auto allocations = backend.counts().allocations.load();
  for (int i = 0; i < 5; ++i) (void)streamer.forward(x, context);
  CHECK(backend.counts().synchronizes.load() + backend.counts().queries.load() +
            backend.counts().notifies.load() ==
        before);
  CHECK(backend.counts().allocations.load() == allocations);
  streamer.drain();
}

TEST_CASE("cuda: conversion, inference mode, closing and an output that outlives the streamer") {
  if (!support::cuda_usable()) return;
  const ToyModel model{bs::DType::bf16};
  ToyContext context;
  at::Tensor kept;
  at::Tensor first;
  {
    auto options = support::toy_options();
    options.dtype = bs::DType::f32;
    support::ToyStreamer<bs::CudaBackend> streamer{model.blocks(), model.storage("file"),
                                                   bs::CudaBackend{0}, options};
    const auto x = support::toy_input().to(cuda);
    {
      const c10::InferenceMode inference;
      first = streamer.forward(x, context);
    }
    streamer.close();
    kept = streamer.forward(x, context);
    CHECK(same_bits(kept.cpu(), first.cpu()));
    CHECK_THROWS(streamer.forward(support::toy_input(), context));  // on the CPU
  }
  CHECK(same_bits(kept.cpu(), first.cpu()));
}

TEST_CASE(
    "cuda: one token attends to any number of tokens, in every type, as the definition says") {
  if (!support::cuda_usable()) return;
  const c10::NoGradGuard no_grad;
  const double scale = 1 / std::sqrt(64.0);
  for (const auto& [dtype, tolerance] :
       {std::pair{at::kFloat, 1e-5}, std::pair{at::kHalf, 2e-3}, std::pair{at::kBFloat16, 2e-2}}) {
    const at::Tensor cache =
        at::randn({2, 3, 2, 80, 64}, at::TensorOptions{}.dtype(dtype).device(cuda));  // k and v
    for (std::int64_t length = 1; length <= 70; length += length < 10 ? 1 : 13) {
      const at::Tensor q =
          at::randn({3, 1, 8, 64}, at::TensorOptions{}.dtype(dtype).device(cuda)).transpose(1, 2);
      const at::Tensor k = cache[0].narrow(2, 0, length), v = cache[1].narrow(2, 0, length);
      const at::Tensor attended = bs::attend(q, k, v, {length - 1, {}, {}, false});
      const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble); };
      const at::Tensor keys = wide(k).repeat_interleave(4, 1),
                       values = wide(v).repeat_interleave(4, 1);
      const at::Tensor expected =
          (wide(q).matmul(keys.transpose(-2, -1)) * scale).softmax(-1).matmul(values);
      INFO("length " << length << ", " << dtype);
      CHECK((wide(attended) - expected).abs().max().item<double>() < tolerance);
    }
  }
}
