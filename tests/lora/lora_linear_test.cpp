// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/lora/lora_linear.hpp>

#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/block/module_block.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

constexpr std::int64_t width = 12;

// [lora_linear]
/// An MLP whose maps keep their weights; what trains is beside them.
struct AdaptedMlpImpl : torch::nn::Module {
  AdaptedMlpImpl(const torch::nn::Linear& wide, const torch::nn::Linear& narrow)
      : up{register_module("up", bs::LoraLinear{wide, bs::LoraLinearOptions{.rank = 4}})},
        down{register_module("down", bs::LoraLinear{narrow, bs::LoraLinearOptions{.rank = 4}})} {}
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(at::gelu(up->forward(x))); }
  bs::LoraLinear up, down;
};
TORCH_MODULE(AdaptedMlp);
// [/lora_linear]

at::Tensor noise(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed)) * 0.3;
}

/// The same modules every time, B not zero.
std::vector<AdaptedMlp> modules(at::ScalarType dtype = at::kFloat) {
  const c10::NoGradGuard no_grad;
  std::vector<AdaptedMlp> list;
  for (std::uint64_t i = 0; i < 4; ++i) {
    torch::nn::Linear wide{width, 20}, narrow{20, width};
    std::uint64_t seed = 100 * i;
    for (torch::nn::Linear module : {wide, narrow}) {
      for (at::Tensor& tensor : module->parameters()) tensor.copy_(noise(tensor.sizes(), ++seed));
      module->to(dtype);
    }
    AdaptedMlp mlp{wide, narrow};
    for (const auto& map : {mlp->up, mlp->down}) {
      map->lora_a.copy_(noise(map->lora_a.sizes(), ++seed));
      map->lora_b.copy_(noise(map->lora_b.sizes(), ++seed));
    }
    list.push_back(mlp);
  }
  return list;
}

std::vector<at::Tensor> trained(const std::vector<AdaptedMlp>& list) {
  std::vector<at::Tensor> all;
  for (const AdaptedMlp& mlp : list) {
    for (const at::Tensor& tensor : mlp->parameters()) {
      if (tensor.requires_grad()) all.push_back(tensor);
    }
  }
  return all;
}

}  // namespace

TEST_CASE("a LoraLinear adds scale times B A x to the map whose weights it shares") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const bool rslora = GENERATE(false, true);
  torch::nn::Linear base{width, 20};
  base->to(dtype);
  bs::LoraLinear map{base, bs::LoraLinearOptions{.rank = 4, .alpha = 6, .use_rslora = rslora}};
  CHECK(map->weight.is_same(base->weight));
  CHECK(map->bias.is_same(base->bias));
  CHECK_FALSE(map->weight.requires_grad());
  CHECK_FALSE(map->bias.requires_grad());
  CHECK(map->lora_a.requires_grad());
  CHECK(map->lora_a.scalar_type() == at::kFloat);
  CHECK(map->lora_a.abs().max().item<double>() <= 1 / std::sqrt(12.0));
  const at::Tensor x = noise({3, 5, width}, 1).to(dtype);
  const at::Tensor plain = at::linear(x, base->weight, base->bias);
  CHECK(at::equal(map->forward(x), plain));  // B is zero
  const c10::NoGradGuard no_grad;
  map->lora_b.copy_(noise({20, 4}, 2));
  const double scale = rslora ? 3 : 1.5;
  CHECK(map->scale() == scale);
  const at::Tensor term =
      at::matmul(at::matmul(x.to(at::kFloat), map->lora_a.t()), map->lora_b.t());
  const at::Tensor expected = (plain.to(at::kFloat) + scale * term).to(dtype);
  const at::Tensor got = map->forward(x);
  CHECK(got.scalar_type() == dtype);
  CHECK(got.sub(expected).abs().max().item<double>() < (dtype == at::kFloat ? 1e-6 : 0.02));
}

TEST_CASE("in a streamed list A and B train as in the resident one, and the base stays") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const std::uint32_t ahead = GENERATE(0U, 1U);
  auto ours = modules(dtype), theirs = modules(dtype);
  std::vector<bs::ModuleBlock<AdaptedMlp>> blocks{ours.begin(), ours.end()};
  bs::StreamerOptions options;
  options.prefetch_ahead = ahead;
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{blocks, std::move(storage), bs::HostBackend{bs::HostMode::detached},
                        options};
  streamer.train();
  const auto parameters = streamer.parameters();
  REQUIRE(parameters.size() == 4 * 4);  // A and B of two maps a block
  const at::Tensor base = ours[2]->up->weight.clone();
  torch::optim::AdamW optimizer{parameters, torch::optim::AdamWOptions{1e-2}};
  torch::optim::AdamW resident{trained(theirs), torch::optim::AdamWOptions{1e-2}};
  for (std::uint64_t step = 0; step < 5; ++step) {
    const at::Tensor x = noise({6, width}, 50 + step).to(dtype);
    optimizer.zero_grad();
    resident.zero_grad();
    at::Tensor hidden = x;
    for (auto& mlp : theirs) hidden = mlp->forward(hidden);
    hidden.to(at::kFloat).square().sum().backward();
    streamer.forward(x).to(at::kFloat).square().sum().backward();
    const auto expected = trained(theirs), got = trained(ours);
    for (std::size_t i = 0; i < got.size(); ++i) {
      REQUIRE(got[i].grad().defined());
      CHECK(at::equal(got[i].grad(), expected[i].grad()));
    }
    optimizer.step();
    resident.step();
  }
  CHECK(at::equal(ours[2]->up->weight, base));
  CHECK_FALSE(ours[2]->up->weight.grad().defined());
}

TEST_CASE("dropout of a LoraLinear acts in training alone, and the same in a recompute") {
  torch::nn::Linear wide{width, 20};
  const bs::LoraLinearOptions form{.rank = 4, .dropout = 0.5};
  bs::LoraLinear map{wide, form};
  {
    const c10::NoGradGuard no_grad;
    map->lora_b.copy_(noise({20, 4}, 2));
  }
  const at::Tensor x = noise({6, width}, 3);
  torch::manual_seed(5);
  const at::Tensor dropped = map->forward(x).detach();
  map->eval();
  CHECK(at::equal(map->forward(x), map->forward(x)));
  CHECK_FALSE(at::equal(map->forward(x), dropped));

  std::vector<bs::ModuleBlock<bs::LoraLinear>> blocks;
  blocks.emplace_back(map);
  bs::Streamer streamer{blocks, bs::ram_storage_of(blocks), bs::HostBackend{}};
  streamer.train();
  torch::manual_seed(5);
  const at::Tensor output = streamer.forward(x);
  CHECK(at::equal(output, dropped));
  output.sum().backward();  // the mask that the forward drew gives A's gradient
  const at::Tensor streamed = map->lora_a.grad().clone();
  map->lora_a.mutable_grad() = at::Tensor{};
  torch::manual_seed(5);
  map->forward(x).sum().backward();
  CHECK(at::equal(map->lora_a.grad(), streamed));
}

TEST_CASE("a LoraLinear refuses ranks and options that describe no adapter") {
  const torch::nn::Linear base{12, 20};
  CHECK_THROWS_WITH((bs::LoraLinear{base, bs::LoraLinearOptions{.rank = 13}}),
                    ContainsSubstring("rank 13") && ContainsSubstring("(20, 12)"));
  CHECK_THROWS_AS((bs::LoraLinear{base, bs::LoraLinearOptions{.rank = 0}}), bs::UnsupportedError);
  CHECK_THROWS_AS((bs::LoraLinear{base, bs::LoraLinearOptions{.rank = 2, .dropout = 1}}),
                  bs::UnsupportedError);
  const torch::nn::Linear plain{torch::nn::LinearOptions(12, 20).bias(false)};
  bs::LoraLinear map{plain, bs::LoraLinearOptions{.rank = 2}};
  CHECK_FALSE(map->bias.defined());
  CHECK(map->parameters().size() == 3);
}
