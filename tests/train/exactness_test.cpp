// SPDX-License-Identifier: Apache-2.0
// Full training in less usual circumstances, compared with the same modules resident.
#include "mlps.hpp"

#include <block_streamer/block/any_block.hpp>

#include <c10/core/InferenceMode.h>

#include <torch/nn/modules/dropout.h>

#include <thread>
#include <utility>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::make_mlps;
using support::Mlp;
using support::modes;
using support::parameters_of;
using support::same_bits;
using support::stream_mlps;
using support::train_options;

TEST_CASE("depth x type x accumulation: gradients are the resident run's, bit for bit") {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto make = [&] {
      auto modules = make_mlps(4);
      for (auto& module : modules) module->to(type);
      return modules;
    };
    auto reference = make();
    const auto accumulate = [&](auto&& forward) {
      std::vector<at::Tensor> of_inputs;
      for (std::uint64_t i = 0; i < 3; ++i) {
        const at::Tensor x = batch(i).to(type).set_requires_grad(true);
        forward(x).square().sum().backward();
        of_inputs.push_back(x.grad());
      }
      return of_inputs;
    };
    const auto expected =
        accumulate([&](const at::Tensor& x) { return support::resident(reference, x); });
    for (const auto mode : modes) {
      for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
        INFO(type << " ahead " << ahead);
        auto modules = make();
        auto streamer = stream_mlps(modules, mode, ahead);
        const auto of_inputs = accumulate([&](const at::Tensor& x) { return streamer.forward(x); });
        CHECK(support::same_values(of_inputs, expected));
        CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
      }
    }
  }
}

TEST_CASE("two forwards of one streamer in one loss, one beside or upon the other, on any thread") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    auto streamer = stream_mlps(modules, mode);
    const auto loss = [](auto&& forward) {
      return forward(batch(1)).square().sum() + forward(batch(2)).sum();
    };
    loss([&](const at::Tensor& x) { return support::resident(reference, x); }).backward();
    const at::Tensor streamed = loss([&](const at::Tensor& x) { return streamer.forward(x); });
    std::thread{[&] { streamed.backward(); }}.join();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
    for (auto& parameter : parameters_of(modules)) parameter.mutable_grad() = at::Tensor{};
    for (auto& parameter : parameters_of(reference)) parameter.mutable_grad() = at::Tensor{};
    const auto upon = [](auto&& forward) { return forward(forward(batch(1))).square().sum(); };
    upon([&](const at::Tensor& x) { return support::resident(reference, x); }).backward();
    upon([&](const at::Tensor& x) { return streamer.forward(x); }).backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("a first forward in inference mode leaves nothing that training would trip over") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    auto streamer = stream_mlps(modules, mode, 2);
    at::Tensor output, inference_input;
    {
      const c10::InferenceMode inference;
      output = streamer.forward(batch());
      inference_input = batch();
    }
    CHECK(same_bits(output, support::resident(reference, batch()).detach()));
    support::resident(reference, batch()).sum().backward();
    streamer.forward(batch()).sum().backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
    CHECK_THROWS_WITH(streamer.forward(inference_input), ContainsSubstring("inference mode"));
    CHECK_NOTHROW(streamer.forward(batch()).sum().backward());
  }
}

TEST_CASE("two streamers train in turns, forwards and backwards interleaved") {
  for (const auto mode : modes) {
    auto a = make_mlps(3), b = make_mlps(4), of_a = make_mlps(3), of_b = make_mlps(4);
    auto first = stream_mlps(a, mode, 0), second = stream_mlps(b, mode, 2);
    const auto steps = [](auto&& one, auto&& two, const auto& parameters) {
      for (std::uint64_t i = 0; i < 3; ++i) {
        const at::Tensor x = one(batch(i)), y = two(x.detach());
        const at::Tensor z = two(one(batch(10 + i)));
        x.sum().backward();
        z.square().sum().backward();
        y.sum().backward();
        for (const at::Tensor& parameter : parameters) {
          if (!parameter.grad().defined()) continue;
          parameter.data().sub_(parameter.grad(), 1e-3);
          parameter.mutable_grad() = at::Tensor{};
        }
      }
    };
    auto ours = parameters_of(a), theirs = parameters_of(of_a);
    for (const auto& parameter : parameters_of(b)) ours.push_back(parameter);
    for (const auto& parameter : parameters_of(of_b)) theirs.push_back(parameter);
    steps([&](const at::Tensor& x) { return first.forward(x); },
          [&](const at::Tensor& x) { return second.forward(x); }, ours);
    steps([&](const at::Tensor& x) { return support::resident(of_a, x); },
          [&](const at::Tensor& x) { return support::resident(of_b, x); }, theirs);
    CHECK(support::same_values(ours, theirs));
  }
}

TEST_CASE("modes and types switched between a forward and its backward") {
  struct PartsImpl : torch::nn::Module {
    PartsImpl() {
      register_module("linear", linear);
      register_module("drop", drop);
    }
    at::Tensor forward(const at::Tensor& x) { return drop->forward(linear->forward(x)); }
    torch::nn::Linear linear{support::width, support::width};
    torch::nn::Dropout drop{0.5};
  };
  const auto first = std::make_shared<PartsImpl>(), second = std::make_shared<PartsImpl>();
  using Any = bs::AnyBlock<at::Tensor, bs::NoContext>;
  std::vector<Any> blocks;
  blocks.emplace_back(bs::ModuleBlock<PartsImpl>{first});
  blocks.emplace_back(bs::ModuleBlock<PartsImpl>{second});
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{}};
  streamer.train();
  SECTION("the streamer's own mode does not matter: a recompute computes as the forward did") {
    at::manual_seed(1);
    const at::Tensor loss = streamer.forward(batch()).sum();
    streamer.eval();
    (void)streamer.forward(batch());
    loss.backward();
    const at::Tensor switched = std::exchange(first->linear->weight.mutable_grad(), {});
    streamer.train();
    at::manual_seed(1);
    streamer.forward(batch()).sum().backward();
    CHECK(same_bits(switched, first->linear->weight.grad()));
  }
  SECTION("a part of a module, that is refused by name") {
    const at::Tensor loss = streamer.forward(batch()).sum();
    second->drop->eval();
    CHECK_THROWS_WITH(loss.backward(),
                      ContainsSubstring("block 1") && ContainsSubstring("evaluation"));
    CHECK_FALSE(second->linear->weight.grad().defined());
    CHECK_NOTHROW(streamer.forward(batch()).sum().backward());  // as it is now
  }
  SECTION("memory and type") {
    const at::Tensor loss = streamer.forward(batch()).sum();
    first->linear->to(at::kDouble);
    CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("block 0, linear.weight") &&
                                           ContainsSubstring("new memory"));
  }
  SECTION("the streamer's type") {
    const at::Tensor loss = streamer.forward(batch()).sum();
    streamer.to(bs::DType::bf16);
    CHECK_THROWS_WITH(loss.backward(), ContainsSubstring("dtype"));
  }
}
