// SPDX-License-Identifier: Apache-2.0
// Faults that others met, as far as no other test has their case.
#include "mlps.hpp"

#include <block_streamer/block/function_block.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/optim/gradient_norm.hpp>
#include <block_streamer/optim/sgd.hpp>

#include <ATen/Context.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::modes;
using support::same_bits;

namespace {

/// x·Wᵀ with a backward of its own, which keeps the weight as a plain field.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->saved_data["x"] = x;
    context->saved_data["weight"] = weight;
    return at::mm(x, weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor x = context->saved_data["x"].toTensor(),
                     weight = context->saved_data["weight"].toTensor();
    return {at::mm(gradients[0], weight), at::mm(gradients[0].t(), x)};
  }
};

at::Tensor square_batch(std::uint64_t seed) {
  return (at::randn({12, 12}, at::detail::createCPUGenerator(seed)) * 0.3).set_requires_grad(true);
}

template <class Block, class Optimizer = bs::ExternalOptimizer>
auto stream(std::vector<Block> blocks, bs::HostMode mode, std::uint32_t ahead = 0,
            Optimizer optimizer = {}) {
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                        support::train_options(ahead), std::move(optimizer)};
  streamer.train();
  return streamer;
}

}  // namespace

TEST_CASE("b85 blocks of equal shape share a slot, which is overwritten before the backward") {
  for (const auto mode : modes) {
    // Frozen weights as well: those stay resident between passes.
    for (const bool frozen : {false, true}) {
      std::vector<at::Tensor> weights{square_batch(1), square_batch(2), square_batch(3)}, reference;
      for (at::Tensor& weight : weights) {
        weight.set_requires_grad(!frozen);
        reference.push_back(weight.detach().clone().set_requires_grad(!frozen));
      }
      const auto spoil = std::make_shared<bool>(false);
      std::vector<bs::FunctionBlock<>> blocks;
      for (const at::Tensor& weight : weights) {
        const bool last = blocks.size() == 2;  // what the backward visits first
        blocks.emplace_back(
            std::vector<bs::NamedTensor>{{"w", weight}},
            [spoil, last](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
              if (*spoil && last) {  // the slot's bytes are no block's any more
                std::memset(w[0].data_ptr(), 0x7f, w[0].nbytes());
                throw std::runtime_error{"spoilt"};
              }
              return at::tanh(OwnLinear::apply(x, w[0]));
            });
      }
      auto streamer = stream(std::move(blocks), mode);
      CHECK(streamer.shape().slot_count == 1);
      const at::Tensor x = batch().set_requires_grad(true);
      const at::Tensor x2 = batch().set_requires_grad(true);
      const at::Tensor loss = streamer.forward(x).square().sum();
      *spoil = true;
      CHECK_THROWS_WITH(streamer.forward(batch(9)), ContainsSubstring("spoilt"));
      *spoil = false;
      loss.backward();
      at::Tensor hidden = x2;
      for (const at::Tensor& weight : reference)
        hidden = at::tanh(OwnLinear::apply(hidden, weight));
      hidden.square().sum().backward();
      CHECK(same_bits(x.grad(), x2.grad()));
      CHECK(support::same_gradients(weights, reference));
      CHECK(weights[0].grad().defined() == !frozen);
    }
  }
}

TEST_CASE("b91 a gradient is clipped once, when the micro-batches are summed") {
  const at::Tensor weight = at::zeros({2}).set_requires_grad(true);
  std::vector<bs::FunctionBlock<>> blocks;
  blocks.emplace_back(
      std::vector<bs::NamedTensor>{{"w", weight}},
      [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) { return x * w[0]; });
  auto streamer = stream(std::move(blocks), bs::HostMode::detached, 0, bs::Sgd{{}});
  streamer.forward(at::tensor({2.0F, 0.0F})).sum().backward();
  streamer.forward(at::tensor({0.0F, 2.0F})).sum().backward();
  CHECK(at::equal(weight.grad(), at::tensor({2.0F, 2.0F})));
  const std::vector<at::Tensor> gradients{weight.grad()};
  const double norm = bs::global_gradient_norm(gradients);
  streamer.step({1, 1.0, bs::clip_factor(norm, 1.0)});
  // Clipped one by one they would be [1, 0] and [0, 1], and the sum [1, 1].
  CHECK(weight.allclose(at::full({2}, -std::sqrt(0.5)), 1e-6, 1e-6));
}

TEST_CASE("b92 AdamW with clipping and four micro-batches is the plain step, or none at all") {
  for (const auto mode : modes) {
    auto modules = support::make_mlps(), reference = support::make_mlps();
    auto streamer = stream(support::blocks_of(modules), mode, 1, bs::AdamW{{.weight_decay = 0.01}});
    const auto ours = support::parameters_of(modules), theirs = support::parameters_of(reference);
    torch::optim::AdamW plain{theirs, torch::optim::AdamWOptions{1e-2}};
    const auto backward = [&](auto&& forward) {
      for (std::uint64_t micro = 0; micro < 4; ++micro)
        (forward(batch(micro)) - batch(micro + 50)).square().sum().backward();
    };
    const auto gradients_of = [](const std::vector<at::Tensor>& parameters) {
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
      return gradients;
    };
    for (std::uint64_t step = 1; step <= 3; ++step) {
      plain.zero_grad();
      backward([&](const at::Tensor& x) { return support::resident(reference, x); });
      torch::nn::utils::clip_grad_norm_(theirs, 0.5);
      plain.step();
      backward([&](const at::Tensor& x) { return streamer.forward(x); });
      const double norm = bs::global_gradient_norm(gradients_of(streamer.parameters()));
      CHECK(norm > 0.5);
      streamer.step({step, 1e-2, bs::clip_factor(norm, 0.5)});
    }
    for (std::size_t i = 0; i < ours.size(); ++i) CHECK(ours[i].allclose(theirs[i], 1e-4, 1e-5));
    // The first block's gradient is the last to come. One that is not finite is known before
    // anything is stepped.
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : ours) before.push_back(parameter.detach().clone());
    at::Tensor x = batch(1);
    x.index_put_({0, 0}, std::numeric_limits<float>::infinity());
    streamer.forward(x).sum().backward();
    CHECK_FALSE(std::isfinite(bs::global_gradient_norm(gradients_of(streamer.parameters()))));
    for (std::size_t i = 0; i < ours.size(); ++i) CHECK(same_bits(ours[i].detach(), before[i]));
  }
}

TEST_CASE("b100 a backward on another thread draws again what the forward drew, and no more") {
  for (const auto mode : modes) {
    const at::Tensor weight = square_batch(4), reference = square_batch(4);
    const auto block = [](const at::Tensor& w, const at::Tensor& x) {
      return at::tanh(at::linear(at::dropout(x, 0.5, /*train=*/true) + at::randn_like(x), w));
    };
    std::vector<bs::FunctionBlock<>> blocks;
    for (int i = 0; i < 3; ++i) {  // one weight, three uses
      blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", weight}},
                          [block](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                            return block(w[0], x);
                          });
    }
    auto streamer = stream(std::move(blocks), mode, 1);
    at::manual_seed(11);
    at::Tensor hidden = batch();
    for (int i = 0; i < 3; ++i) hidden = block(reference, hidden);
    const at::Tensor next = at::randn({4});
    hidden.square().sum().backward();

    at::manual_seed(11);
    const at::Tensor output = streamer.forward(batch());
    CHECK(same_bits(output.detach(), hidden.detach()));
    CHECK(same_bits(at::randn({4}), next));  // the outer stream goes on behind the forward
    const at::Tensor after = at::randn({4});
    at::manual_seed(11);
    const at::Tensor again = streamer.forward(batch());
    (void)at::randn({4});
    std::thread other{[&] { again.square().sum().backward(); }};
    other.join();
    CHECK(same_bits(at::randn({4}), after));  // and the backward draws none of it
    CHECK(weight.grad().allclose(reference.grad(), 1e-5, 1e-6));
    at::manual_seed(99);
    const at::Tensor foreign = streamer.forward(batch());
    CHECK_FALSE(foreign.allclose(output));
  }
}

TEST_CASE("b104 a tied table has one storage, one gradient, one state, through save and resume") {
  const auto table = [] {
    return (at::randn({9, 12}, at::detail::createCPUGenerator(5)) * 0.3).set_requires_grad(true);
  };
  const auto list = [](const at::Tensor& tied, const at::Tensor& inner) {
    std::vector<bs::FunctionBlock<>> blocks;
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"embedding", tied}},
                        [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          return at::mm(x, w[0]);  // x: (B,V), one 1 a row
                        });
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", inner}},
                        [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          return x + at::tanh(at::linear(x, w[0]));
                        });
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"head", tied}},
                        [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          return at::linear(x, w[0]);  // (B,V)
                        });
    return blocks;
  };
  const at::Tensor x = at::eye(9), wanted = at::arange(9).add(4).remainder(9);
  const auto loss_of = [&](const at::Tensor& logits) {
    return at::cross_entropy_loss(logits, wanted);
  };
  const torch::optim::AdamWOptions form{2e-2};
  for (const auto mode : modes) {
    const at::Tensor tied = table(), inner = square_batch(6), tied2 = table(),
                     inner2 = square_batch(6);
    auto streamer = stream(list(tied, inner), mode);
    const auto parameters = streamer.parameters();
    REQUIRE(parameters.size() == 2);
    CHECK(parameters[0].is_same(tied));
    torch::optim::AdamW optimizer{parameters, form}, resident{{tied2, inner2}, form};
    double last = 0;
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      resident.zero_grad();
      const at::Tensor loss = loss_of(streamer.forward(x));
      loss.backward();
      const at::Tensor h = at::mm(x, tied2);
      loss_of(at::linear(h + at::tanh(at::linear(h, inner2)), tied2)).backward();
      CHECK(tied.grad().allclose(tied2.grad(), 1e-4, 1e-6));  // the sum of both uses
      optimizer.step();
      resident.step();
      last = loss.item<double>();
    }
    CHECK(optimizer.state().size() == 2);
    CHECK(last < 1);
    // Save, and go on with it in a list of its own.
    std::stringstream weights, state;
    torch::save(std::vector<at::Tensor>{tied, inner}, weights);
    torch::save(optimizer, state);
    std::vector<at::Tensor> loaded;
    torch::load(loaded, weights);
    const at::Tensor tied3 = loaded[0].detach().set_requires_grad(true),
                     inner3 = loaded[1].detach().set_requires_grad(true);
    auto resumed = stream(list(tied3, inner3), mode);
    REQUIRE(resumed.parameters().size() == 2);
    torch::optim::AdamW again{resumed.parameters(), form};
    torch::load(again, state);
    for (int step = 0; step < 5; ++step) {
      for (auto* one : {&optimizer, &again}) one->zero_grad();
      const at::Tensor ours = loss_of(streamer.forward(x)), theirs = loss_of(resumed.forward(x));
      CHECK(same_bits(ours.detach(), theirs.detach()));
      if (step == 0) CHECK(theirs.item<double>() <= last + 1e-3);  // no jump
      ours.backward();
      theirs.backward();
      optimizer.step();
      again.step();
    }
    CHECK(same_bits(tied.detach(), tied3.detach()));
  }
}
