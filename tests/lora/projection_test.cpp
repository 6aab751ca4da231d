// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/block/projection.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/train/rng_replay.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/signbit.h>
#include <c10/core/InferenceMode.h>

#include <cmath>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

at::Tensor values(at::IntArrayRef sizes, double salt, double scale = 1) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return at::arange(count, at::kDouble)
      .mul(0.37)
      .add(salt)
      .sin()
      .mul(scale)
      .to(at::kFloat)
      .view(sizes);
}

std::vector<bs::LoraBlock> blocks(std::size_t count, const std::string& stem = "model.layers.") {
  std::vector<bs::LoraBlock> list;
  for (std::size_t i = 0; i < count; ++i)
    list.push_back({.prefix = stem + std::to_string(i),
                    .specs = {{"input_layernorm.weight", {12}, false},
                              {"self_attn.q_proj.weight", {20, 12}, true},
                              {"self_attn.o_proj.weight", {12, 20}, true},
                              {"mlp.down_proj.weight", {12, 28}, true}}});
  return list;
}

std::vector<std::string> names_of(const bs::LoraAdapter& adapter) {
  std::vector<std::string> names;
  for (const bs::LoraModule& module : adapter.modules()) names.push_back(module.site.module);
  return names;
}

/// PEFT's formula, written with other operations: result + B(A(x)) * scaling in fp32, cast back.
at::Tensor peft(const at::Tensor& x, const at::Tensor& output, const at::Tensor& a,
                const at::Tensor& b, double scale) {
  const at::Tensor low = at::matmul(x.to(at::kFloat), a.t());
  return output.add(at::matmul(low, b.t()).mul(scale)).to(output.scalar_type());
}

/// Small weights whose names and sizes fit blocks().
std::vector<at::Tensor> weights(at::ScalarType dtype = at::kFloat) {
  return {values({12}, 1).to(dtype), values({20, 12}, 2, 0.3).to(dtype),
          values({12, 20}, 3, 0.3).to(dtype), values({12, 28}, 4, 0.3).to(dtype)};
}

std::vector<const bs::ProjectionAdapter*> pointers(const bs::BlockAdapters& adapters) {
  std::vector<const bs::ProjectionAdapter*> list;
  for (const auto& adapter : adapters.by_weight) list.push_back(adapter.get());
  return list;
}

}  // namespace

TEST_CASE("the projection adds PEFT's term in the adapter's dtype and keeps the output's") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble);
  const double dropout = GENERATE(0.0, 0.5);
  const at::Tensor a = values({3, 12}, 5);
  const at::Tensor b = values({20, 3}, 6);
  const bs::LoraProjection adapter{a, b, 1.75, dropout};
  const at::Tensor x = values({2, 5, 12}, 7).to(dtype);
  const at::Tensor output = values({2, 5, 20}, 8).to(dtype);
  const at::Tensor kept = output.clone();
  const at::Tensor got = adapter.add(x, output, /*training=*/false);  // dropout rests
  CHECK(got.scalar_type() == dtype);
  const at::Tensor expected = peft(x, output, a, b, 1.75);
  const double tolerance = dtype == at::kBFloat16 ? 0.07 : dtype == at::kHalf ? 0.01 : 1e-5;
  CHECK(got.sub(expected).abs().max().item<double>() <= tolerance);
  CHECK(got.sub(output).abs().max().item<double>() > 0.5);
  CHECK(at::equal(output, kept));
}

TEST_CASE("a new adapter leaves every output bit as it was, -0 aside") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  const auto list = blocks(2);
  const bs::LoraAdapter adapter =
      bs::make_lora_adapter(list, {.rank = 5, .dropout = 0.3}, at::kCPU);
  const bs::AdapterTable table = adapter.table(list);
  const auto bound = weights(dtype);
  const auto woven = pointers(table.blocks[1]);
  const at::Tensor x = values({2, 3, 12}, 9, 40).to(dtype);
  for (const bool training : {false, true}) {
    const at::Tensor plain = bs::project(bs::Weights{bound}, 1, x);
    CHECK(at::equal(bs::project(bs::Weights{bound, woven, training}, 1, x), plain));
  }
  const at::Tensor minus_zero = at::full({1, 1, 20}, -0.0, at::kFloat);
  const at::Tensor got =
      table.blocks[0].by_weight[1]->add(values({1, 1, 12}, 1), minus_zero, false);
  CHECK(got.eq(0).all().item<bool>());  // equal to -0, though the sign may be gone
}

TEST_CASE("gradients reach A and B alone and equal those of the written-out formula") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto list = blocks(1);
  const bs::LoraAdapter adapter =
      bs::make_lora_adapter(list, {.rank = 4, .alpha = 6, .targets = {"q_proj"}}, at::kCPU);
  const bs::LoraModule& module = adapter.modules()[0];
  module.b.set_data(values({20, 4}, 3, 0.2));
  const bs::AdapterTable table = adapter.table(list);
  auto bound = weights(dtype);
  const auto woven = pointers(table.blocks[0]);
  const at::Tensor x = values({2, 3, 12}, 9).to(dtype).set_requires_grad(true);
  bs::project(bs::Weights{bound, woven, true}, 1, x).to(at::kFloat).square().sum().backward();

  const at::Tensor a2 = module.a.detach().clone().set_requires_grad(true);
  const at::Tensor b2 = module.b.detach().clone().set_requires_grad(true);
  const at::Tensor x2 = x.detach().clone().set_requires_grad(true);
  peft(x2, at::matmul(x2, bound[1].t()), a2, b2, 1.5).to(at::kFloat).square().sum().backward();
  const double tolerance = dtype == at::kFloat ? 1e-4 : 0.2;
  CHECK(module.a.grad().scalar_type() == at::kFloat);
  CHECK(module.a.grad().sub(a2.grad()).abs().max().item<double>() < tolerance);
  CHECK(module.b.grad().sub(b2.grad()).abs().max().item<double>() < tolerance);
  CHECK(x.grad().sub(x2.grad()).abs().max().item<double>() < tolerance);
  CHECK(module.a.grad().abs().max().item<double>() > 1);
  for (const at::Tensor& weight : bound) CHECK_FALSE(weight.grad().defined());
}

TEST_CASE(
    "b99 LoRA dropout draws the same mask in a recompute and leaves the caller's state alone") {
  const auto list = blocks(1);
  const bs::LoraAdapter adapter =
      bs::make_lora_adapter(list, {.rank = 4, .dropout = 0.5, .targets = {"q_proj"}}, at::kCPU);
  adapter.modules()[0].b.set_data(values({20, 4}, 3));
  const bs::AdapterTable table = adapter.table(list);
  const auto bound = weights();
  const auto woven = pointers(table.blocks[0]);
  const at::Tensor x = values({2, 3, 12}, 9);
  const auto forward = [&] { return bs::project(bs::Weights{bound, woven, true}, 1, x); };
  const auto gradients = [&](const at::Tensor& output) {
    adapter.modules()[0].a.mutable_grad() = at::Tensor{};
    output.square().sum().backward();
    return adapter.modules()[0].a.grad().clone();
  };
  const bs::RngState before = bs::RngState::capture(at::kCPU);
  const at::Tensor straight = forward();
  const at::Tensor expected = gradients(straight);
  const at::Tensor next = at::rand({3});
  before.apply();
  (void)forward();                     // the forward whose graph is thrown away
  const at::Tensor other = forward();  // without replay the mask differs
  CHECK_FALSE(at::equal(other, straight));
  before.apply();
  (void)forward();
  at::Tensor again;
  {
    const bs::RngScope scope{before};
    again = forward();
  }
  CHECK(at::equal(again, straight));
  CHECK(at::equal(gradients(again), expected));
  CHECK(at::equal(at::rand({3}), next));
}

TEST_CASE("b89 scale and dropout of an adapter cannot change between forward and recompute") {
  STATIC_REQUIRE_FALSE(std::is_copy_assignable_v<bs::LoraProjection>);
  const auto list = blocks(1);
  const bs::LoraAdapter first = bs::make_lora_adapter(list, {.rank = 4, .seed = 1}, at::kCPU);
  const bs::LoraAdapter second =
      bs::make_lora_adapter(list, {.rank = 4, .alpha = 8, .seed = 2}, at::kCPU);
  for (const auto* adapter : {&first, &second})
    adapter->modules()[0].b.set_data(values({20, 4}, 3));
  const bs::AdapterTable one = first.table(list);
  const bs::AdapterTable two = second.table(list);
  const auto bound = weights();
  const auto run = [&](const bs::AdapterTable& table, double salt, bool training) {
    const auto woven = pointers(table.blocks[0]);
    return bs::project(bs::Weights{bound, woven, training}, 1, values({3, 12}, salt)).sum();
  };
  run(one, 1, true).add(run(two, 2, false)).backward();  // one backward through both
  const at::Tensor mixed_one = first.modules()[0].a.grad().clone();
  const at::Tensor mixed_two = second.modules()[0].a.grad().clone();
  first.modules()[0].a.mutable_grad() = at::Tensor{};
  second.modules()[0].a.mutable_grad() = at::Tensor{};
  run(one, 1, true).backward();
  run(two, 2, false).backward();
  CHECK(at::equal(first.modules()[0].a.grad(), mixed_one));
  CHECK(at::equal(second.modules()[0].a.grad(), mixed_two));
}

TEST_CASE("initial values are PEFT's: A uniform within 1/sqrt(in), B zero, the same for a seed") {
  const auto list = blocks(3);
  const bs::RngState callers = bs::RngState::capture(at::kCPU);
  const at::Tensor next = at::rand({3});
  callers.apply();
  const bs::LoraAdapter first = bs::make_lora_adapter(list, {.rank = 12, .seed = 7}, at::kCPU);
  CHECK(at::equal(at::rand({3}), next));  // nobody else's generator was drawn from
  const bs::LoraAdapter again = bs::make_lora_adapter(list, {.rank = 12, .seed = 7}, at::kCPU);
  const bs::LoraAdapter other = bs::make_lora_adapter(list, {.rank = 12, .seed = 8}, at::kCPU);
  CHECK(first.modules().size() == 9);
  CHECK(first.parameter_count() == 3 * 12 * (12 + 20 + 20 + 12 + 28 + 12));
  for (std::size_t i = 0; i < 9; ++i) {
    const bs::LoraModule& module = first.modules()[i];
    const double bound = 1 / std::sqrt(static_cast<double>(module.site.in));
    CHECK(module.a.abs().max().item<double>() <= bound);
    CHECK(module.a.max().item<double>() > 0.9 * bound);
    CHECK(module.a.min().item<double>() < -0.9 * bound);
    CHECK(std::abs(module.a.mean().item<double>()) < 0.2 * bound);
    CHECK(module.b.eq(0).all().item<bool>());
    CHECK(module.a.is_leaf());
    CHECK(module.a.requires_grad());
    CHECK(module.b.requires_grad());
    CHECK(at::equal(module.a, again.modules()[i].a));
    CHECK_FALSE(at::equal(module.a, other.modules()[i].a));
  }
  CHECK_FALSE(at::equal(first.modules()[0].a, first.modules()[3].a));
}

TEST_CASE("an adapter made inside inference mode can be trained") {
  const auto list = blocks(1);
  const bs::LoraAdapter adapter = [&] {
    const c10::InferenceMode guard;
    return bs::make_lora_adapter(list, {.rank = 2}, at::kCPU);
  }();
  const bs::AdapterTable table = adapter.table(list);
  const auto woven = pointers(table.blocks[0]);
  const auto bound = weights();
  bs::project(bs::Weights{bound, woven, true}, 1, values({3, 12}, 1)).sum().backward();
  CHECK(adapter.modules()[0].b.grad().abs().max().item<double>() > 0);
}

TEST_CASE("b113 targets name exact modules, as suffixes of whole components") {
  const auto list = blocks(2);
  const auto pick = [&](std::vector<std::string> targets, double top = 1) {
    return names_of(bs::make_lora_adapter(
        list, {.rank = 1, .targets = std::move(targets), .top_fraction = top}, at::kCPU));
  };
  using Names = std::vector<std::string>;
  CHECK(pick({"q_proj"}) ==
        Names{"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"});
  CHECK(pick({"self_attn.o_proj", "model.layers.1.mlp.down_proj"}) ==
        Names{"model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj",
              "model.layers.1.mlp.down_proj"});
  CHECK(pick({"all-linear"}, 0.5) == Names{"model.layers.1.self_attn.q_proj",
                                           "model.layers.1.self_attn.o_proj",
                                           "model.layers.1.mlp.down_proj"});
  CHECK(pick({"q_proj", "all-linear"}).size() == 6);
}

TEST_CASE("an unknown target is refused with what there is") {
  const auto list = blocks(2);
  const auto refusal = [&](const std::string& target) -> std::string {
    try {
      (void)bs::make_lora_adapter(list, {.targets = {"q_proj", target}}, at::kCPU);
    } catch (const bs::Error& error) {
      return error.what();
    }
    return "accepted";
  };
  for (const char* target : {"proj", "k_proj", "attn.q_proj", "", "input_layernorm"}) {
    CAPTURE(target);
    CHECK(refusal(target).find("it has down_proj o_proj q_proj") != std::string::npos);
  }
  CHECK(refusal("model.layers.7.mlp.down_proj").find("matches no") != std::string::npos);
}

TEST_CASE("b112 embedding and head as targets are refused, not dropped") {
  const auto list = blocks(1);
  for (const char* target : {"embed_tokens", "lm_head", "model.embed_tokens"}) {
    CAPTURE(target);
    CHECK_THROWS_AS(bs::make_lora_adapter(list, {.targets = {"q_proj", target}}, at::kCPU),
                    bs::UnsupportedError);
  }
}

TEST_CASE("the top fraction rounds up, exactly, and leaves the lower blocks bare") {
  CHECK(bs::layer_count_of(0.1, 30) == 3);
  CHECK(bs::layer_count_of(0.3, 10) == 3);
  CHECK(bs::layer_count_of(0.5, 7) == 4);
  CHECK(bs::layer_count_of(1e-6, 30) == 1);
  CHECK(bs::layer_count_of(1, 30) == 30);
  CHECK(bs::layer_count_of(1, 0) == 0);
  const auto list = blocks(5);
  const bs::LoraAdapter adapter = bs::make_lora_adapter(
      list, {.rank = 2, .targets = {"q_proj"}, .top_fraction = 0.5}, at::kCPU);
  const bs::AdapterTable table = adapter.table(list);
  REQUIRE(table.blocks.size() == 5);
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(table.blocks[i].parameters.size() == (i < 2 ? 0U : 2U));
    CHECK(table.blocks[i].by_weight.size() == (i < 2 ? 0U : 4U));
  }
  CHECK(table.blocks[2].by_weight[0] == nullptr);
  CHECK(table.blocks[2].by_weight[1] != nullptr);
  CHECK(table.blocks[2].parameters[0].is_same(adapter.parameters()[0]));
  auto unnumbered = blocks(2);
  unnumbered[1].prefix = "decoder.last";
  CHECK_THROWS_AS(bs::make_lora_adapter(unnumbered, {.top_fraction = 0.5}, at::kCPU),
                  bs::UnsupportedError);
}

TEST_CASE("options outside their ranges are refused by name") {
  const auto list = blocks(1);
  const auto refusal = [&](const bs::LoraOptions& options) -> std::string {
    try {
      (void)bs::make_lora_adapter(list, options, at::kCPU);
    } catch (const bs::UnsupportedError& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(refusal({.rank = 0}).find("rank") != std::string::npos);
  CHECK(refusal({.alpha = 0}).find("alpha") != std::string::npos);
  CHECK(refusal({.alpha = std::nan("")}).find("alpha") != std::string::npos);
  CHECK(refusal({.dropout = 1}).find("dropout") != std::string::npos);
  CHECK(refusal({.dropout = -0.1}).find("dropout") != std::string::npos);
  CHECK(refusal({.targets = {}}).find("target") != std::string::npos);
  CHECK(refusal({.top_fraction = 0}).find("top fraction") != std::string::npos);
  CHECK(refusal({.top_fraction = std::nan("")}).find("top fraction") != std::string::npos);
  CHECK(refusal({.top_fraction = 1.5}).find("top fraction") != std::string::npos);
}

TEST_CASE("rank-stabilised LoRA scales by the root of the rank") {
  CHECK(bs::lora_scale(32, 16, false) == 2);
  CHECK(bs::lora_scale(32, 16, true) == 8);
}
