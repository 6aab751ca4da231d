// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/train/rng_replay.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <stdexcept>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {
at::Tensor logits_of(std::int64_t batch, std::int64_t tokens, std::int64_t vocabulary) {
  return at::arange(batch * tokens * vocabulary, at::kDouble)
      .mul(0.71)
      .sin()
      .mul(3)
      .to(at::kFloat)
      .view({batch, tokens, vocabulary});
}
}  // namespace

TEST_CASE("a replayed state draws the same numbers and the caller's go on undisturbed") {
  const at::Device cpu{at::kCPU};
  (void)at::rand({3});
  const bs::RngState captured = bs::RngState::capture(cpu);
  const at::Tensor drawn = at::rand({5});
  const bs::RngState after = bs::RngState::capture(cpu);
  const at::Tensor expected_next = at::rand({4});
  after.apply();
  at::Tensor replayed;
  {
    const bs::RngScope scope{captured};
    replayed = at::rand({5});
    (void)at::rand({100});
  }
  CHECK(at::equal(replayed, drawn));
  CHECK(at::equal(at::rand({4}), expected_next));
}

TEST_CASE("the caller's random state comes back when the scope ends by an exception") {
  const bs::RngState captured = bs::RngState::capture(at::Device{at::kCPU});
  (void)at::rand({7});
  const bs::RngState callers = bs::RngState::capture(at::Device{at::kCPU});
  const at::Tensor expected = at::rand({4});
  callers.apply();
  try {
    const bs::RngScope scope{captured};
    (void)at::rand({9});
    throw std::runtime_error{"block failed"};
  } catch (const std::runtime_error&) {
  }
  CHECK(at::equal(at::rand({4}), expected));
}

TEST_CASE("nested scopes restore in order, also inside inference mode") {
  const c10::InferenceMode inference;
  const bs::RngState first = bs::RngState::capture(at::Device{at::kCPU});
  const at::Tensor a = at::rand({3});
  const bs::RngState second = bs::RngState::capture(at::Device{at::kCPU});
  const at::Tensor b = at::rand({3});
  const bs::RngScope outer{first};
  {
    const bs::RngScope inner{second};
    CHECK(at::equal(at::rand({3}), b));
  }
  CHECK(at::equal(at::rand({3}), a));
}

TEST_CASE("targets are the next tokens where those are trained") {
  const at::Tensor ids = at::tensor({5, 6, 7, 8, 1, 2, 3, 4}, at::kLong).view({2, 4});
  const at::Tensor trained =
      at::tensor({1, 0, 1, 1, 1, 1, 0, 0}, at::kLong).view({2, 4}).to(at::kBool);
  const bs::TokenTargets targets = bs::token_targets(ids, trained);
  const at::Tensor expected =
      at::tensor({-100, 7, 8, -100, 2, -100, -100, -100}, at::kLong).view({2, 4});
  CHECK(at::equal(targets.targets, expected));
  CHECK(targets.count == 3);  // a row's first token is nobody's target
}

TEST_CASE("the loss is the sum of -log p over the scored positions, in fp32") {
  const at::Tensor logits = logits_of(2, 4, 11).set_requires_grad(true);
  const at::Tensor ids = at::tensor({5, 6, 7, 8, 1, 2, 3, 4}, at::kLong).view({2, 4});
  const at::Tensor trained =
      at::tensor({0, 0, 1, 1, 0, 1, 0, 1}, at::kLong).view({2, 4}).to(at::kBool);
  const bs::TokenLoss loss = bs::token_loss(logits, ids, trained);
  double exact = 0;
  const at::Tensor log_p = logits.detach().to(at::kDouble).log_softmax(-1);
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t t = 0; t < 3; ++t)
      if (trained[b][t + 1].item<bool>())
        exact -= log_p[b][t][ids[b][t + 1].item<std::int64_t>()].item<double>();
  CHECK(loss.count == 4);
  CHECK(loss.sum.scalar_type() == at::kFloat);
  CHECK(loss.sum.item<double>() == Approx(exact).epsilon(1e-6));
  loss.sum.backward();
  CHECK(logits.grad()[0][3].abs().max().item<double>() == 0);  // the last position is unscored
  CHECK(logits.grad()[0][1].abs().max().item<double>() > 0);
}

TEST_CASE("sums over any split of rows of unequal weight add up to one step's loss") {
  const at::Tensor logits = logits_of(5, 7, 13);
  const at::Tensor ids = at::arange(35, at::kLong).remainder(13).view({5, 7});
  const at::Tensor trained = at::arange(35, at::kLong).view({5, 7}).remainder(3).ne(0);
  const bs::TokenLoss whole = bs::token_loss(logits, ids, trained);
  bs::LossTotal total;
  for (const auto& [from, count] : {std::pair{0, 1}, std::pair{1, 3}, std::pair{4, 1}})
    total.add(bs::token_loss(logits.narrow(0, from, count), ids.narrow(0, from, count),
                             trained.narrow(0, from, count)));
  CHECK(total.count() == whole.count);
  CHECK(total.nats() == Approx(whole.sum.item<double>()).epsilon(1e-6));
  CHECK(total.mean() == Approx(whole.sum.item<double>() / static_cast<double>(whole.count)));
}

TEST_CASE("bf16 logits are scored in fp32") {
  const at::Tensor narrow = logits_of(1, 6, 9).to(at::kBFloat16);
  const at::Tensor ids = at::arange(6, at::kLong).view({1, 6});
  const at::Tensor all = ids.ge(0);
  const bs::TokenLoss loss = bs::token_loss(narrow, ids, all);
  CHECK(loss.sum.scalar_type() == at::kFloat);
  CHECK(at::equal(loss.sum, bs::token_loss(narrow.to(at::kFloat), ids, all).sum));
}

TEST_CASE("a batch without a scored token has sum 0 and count 0; a row of one token is legal") {
  const bs::TokenLoss loss = bs::token_loss(logits_of(2, 1, 9), at::zeros({2, 1}, at::kLong),
                                            at::zeros({2, 1}, at::kLong).eq(0));
  CHECK(loss.count == 0);
  CHECK(loss.sum.item<double>() == 0);
  CHECK_THROWS_AS(bs::LossTotal{}.mean(), bs::ContractViolation);
}
