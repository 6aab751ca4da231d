// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/block/projection.hpp>
#include <block_streamer/lora/lora_projection.hpp>
#include <block_streamer/train/rng_replay.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros_like.h>

#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <memory>
#include <vector>

#include <support/catch.hpp>
#include <support/waves.hpp>

namespace bs = block_streamer;
using support::largest;
using support::waves;

namespace {

using Tensors = std::vector<at::Tensor>;

/// Three maps of one x with out 5, 3 and 4: with a bias and a term, with a term, with neither.
struct Group {
  explicit Group(at::ScalarType base, at::ScalarType factors, double dropout = 0)
      : x{waves({2, 3, 6}, 0.1, base).set_requires_grad(true)},
        weights{waves({5, 6}, 0.2, base), waves({5}, 0.3, base), waves({3, 6}, 0.4, base),
                waves({4, 6}, 0.5, base)} {
    for (const auto& [out, seed] : {std::pair{5, 0.6}, {3, 0.7}}) {
      factors_.push_back(waves({2, 6}, seed, factors).set_requires_grad(true));
      factors_.push_back(waves({out, 2}, seed + 0.05, factors).set_requires_grad(true));
      adapters.push_back(std::make_unique<bs::LoraProjection>(
          factors_[factors_.size() - 2], factors_.back(), 0.75 + seed, dropout));
    }
    woven = {adapters[0].get(), nullptr, adapters[1].get(), nullptr};
  }

  [[nodiscard]] std::array<at::Tensor, 3> apply(bool training = true) const {
    return bs::project_all<3>(bs::Weights{weights, woven, training}, {{{0, 1}, {2, {}}, {3, {}}}},
                              x);
  }
  /// The same with single operations.
  [[nodiscard]] std::array<at::Tensor, 3> defined() const {
    return {adapters[0]->add(x, at::linear(x, weights[0], weights[1]), false),
            adapters[1]->add(x, at::linear(x, weights[2]), false), at::linear(x, weights[3])};
  }
  /// x, then A and B of the two terms.
  [[nodiscard]] Tensors trainable() const {
    Tensors all{x};
    all.insert(all.end(), factors_.begin(), factors_.end());
    return all;
  }

  at::Tensor x;
  Tensors weights;
  Tensors factors_;
  std::vector<std::unique_ptr<bs::LoraProjection>> adapters;
  std::vector<const bs::ProjectionAdapter*> woven;
};

at::Tensor weighted(const std::array<at::Tensor, 3>& outputs) {
  at::Tensor sum;
  for (std::size_t i = 0; i < 3; ++i) {
    const at::Tensor part = (outputs[i].to(at::kDouble) * waves(outputs[i].sizes(), 0.9)).sum();
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

}  // namespace

TEST_CASE("maps applied together give what each gives by single operations, gradients included") {
  const auto [base, factors, tolerance] = GENERATE(std::tuple{at::kDouble, at::kDouble, 1e-12},
                                                   std::tuple{at::kFloat, at::kFloat, 2e-5},
                                                   std::tuple{at::kBFloat16, at::kFloat, 0.4});
  const Group group{base, factors};
  const auto got = group.apply(), expected = group.defined();
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(got[i].sizes() == expected[i].sizes());
    CHECK(got[i].scalar_type() == base);
    CHECK(largest(got[i], expected[i]) <= tolerance);
  }
  const Tensors got_gradients = torch::autograd::grad({weighted(got)}, group.trainable());
  const Tensors gradients = torch::autograd::grad({weighted(expected)}, group.trainable());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    INFO("input " << i);
    CHECK(got_gradients[i].scalar_type() == gradients[i].scalar_type());
    CHECK(largest(got_gradients[i], gradients[i]) <= tolerance);
    CHECK(gradients[i].abs().max().item<double>() > 1);
  }
  for (const at::Tensor& weight : group.weights) CHECK_FALSE(weight.requires_grad());
}

TEST_CASE("a gradient that reaches one map leaves the factors of the others without") {
  const Group group{at::kFloat, at::kFloat};
  const Tensors gradients =
      torch::autograd::grad({group.apply()[1].sum()}, group.trainable(), {}, false, false, true);
  const Tensors expected =
      torch::autograd::grad({group.defined()[1].sum()}, group.trainable(), {}, false, false, true);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    REQUIRE(gradients[i].defined() == expected[i].defined());
    if (expected[i].defined()) CHECK(largest(gradients[i], expected[i]) < 1e-5);
  }
  CHECK_FALSE(gradients[1].defined());
  CHECK(gradients[3].defined());
}

TEST_CASE("base weights that train get their gradients beside the adapters") {
  const Group group{at::kDouble, at::kDouble};
  for (const at::Tensor& weight : group.weights) weight.set_requires_grad(true);
  const Tensors got = torch::autograd::grad({weighted(group.apply())}, group.weights);
  const Tensors expected = torch::autograd::grad({weighted(group.defined())}, group.weights);
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(largest(got[i], expected[i]) < 1e-12);
}

TEST_CASE("gradients through dropout are those of differences with the same mask") {
  const Group group{at::kDouble, at::kDouble, 0.4};
  const bs::RngState state = bs::RngState::capture(at::kCPU);
  const auto value = [&] {
    const bs::RngScope replay{state};
    return weighted(group.apply());
  };
  CHECK(largest(value(), weighted(group.defined())) > 0.1);  // dropout is at work
  const Tensors inputs = group.trainable();
  const Tensors gradients = torch::autograd::grad({value()}, inputs);
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor numeric = at::zeros_like(inputs[i]);
    for (std::int64_t j = 0; j < inputs[i].numel(); ++j) {
      const at::Tensor entry = inputs[i].view({-1})[j];
      const double before = entry.item<double>(), step = 1e-5;
      entry.fill_(before + step);
      const double above = value().item<double>();
      entry.fill_(before - step);
      const double below = value().item<double>();
      entry.fill_(before);
      numeric.view({-1})[j] = (above - below) / (2 * step);
    }
    INFO("input " << i);
    CHECK(largest(gradients[i], numeric) < 1e-7);
  }
}

TEST_CASE("a projection's graph refuses changed factors and a second derivative by name") {
  const Group group{at::kFloat, at::kFloat};
  const at::Tensor loss = weighted(group.apply());
  const auto pull = [&](const at::Tensor& of, bool create) {
    return torch::autograd::grad({of}, {group.x}, {}, true, create);
  };
  CHECK_THROWS_WITH(pull(loss, true),
                    ContainsSubstring("ProjectionBackward has no second derivative"));
  CHECK_NOTHROW(pull(loss, false));
  group.factors_[1].detach().add_(1);
  CHECK_THROWS_WITH(pull(loss, false), ContainsSubstring("modified by an inplace operation"));
}
