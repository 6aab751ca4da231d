// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/layers/heads.hpp>
#include <block_streamer/layers/rms_norm.hpp>
#include <block_streamer/layers/rotary.hpp>
#include <block_streamer/layers/swiglu.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>

#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

#include <support/catch.hpp>
#include <support/waves.hpp>

namespace bs = block_streamer;
using support::largest;
using support::waves;

namespace {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

/// Values that look random, differ everywhere and need no generator.
/// The gradients of Σ weights·f for every input.
Tensors gradients_of(const Function& f, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs)
    leaves.push_back(input.detach().clone().set_requires_grad(true));
  const at::Tensor output = f(leaves);
  return torch::autograd::grad({output}, leaves,
                               {waves(output.sizes(), 0.77, output.scalar_type())});
}

/// Values and gradients of a function and of the same written with single operations.
void check_alike(const Function& f, const Function& by_definition, const Tensors& inputs,
                 double tolerance) {
  CHECK(largest(f(inputs), by_definition(inputs)) <= tolerance);
  const Tensors got = gradients_of(f, inputs), expected = gradients_of(by_definition, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    INFO("input " << i);
    CHECK(got[i].sizes() == inputs[i].sizes());
    CHECK(got[i].scalar_type() == inputs[i].scalar_type());
    CHECK(largest(got[i], expected[i]) <= tolerance);
    CHECK(expected[i].abs().max().item<double>() > 100 * tolerance);
  }
}

bs::RotaryTable table_of(std::int64_t tokens, std::int64_t channels, at::ScalarType dtype) {
  return bs::rotary_table(at::arange(3, 3 + tokens).unsqueeze(0),
                          bs::rotary_frequencies(channels, 100.0), dtype);
}

/// Half-split rotation by its definition; x: (B,T,N,D).
at::Tensor turned(const at::Tensor& x, const bs::RotaryTable& table) {
  const auto halves = x.chunk(2, -1);
  return x * table.cos + at::cat({halves[1], halves[0]}, -1) * table.sin;
}

}  // namespace

TEST_CASE("gradients of the norm equal those of its single operations, for input and weight") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto defined = [](const Tensors& in) {
    const at::Tensor wide = in[0].to(at::kFloat);
    const at::Tensor inverse = (wide.pow(2).mean(-1, true) + 1e-3).rsqrt();
    return in[1] * (wide * inverse).to(in[0].scalar_type());
  };
  check_alike([](const Tensors& in) { return bs::rms_norm(in[0], in[1], 1e-3); }, defined,
              {waves({3, 4, 6}, 0.2, dtype), waves({6}, 0.9, dtype)},
              dtype == at::kFloat ? 5e-6 : 0.03);
}

TEST_CASE("gradients of the gated product equal those of its single operations") {
  check_alike([](const Tensors& in) { return bs::detail::gated(in[0], in[1]); },
              [](const Tensors& in) { return at::silu(in[0]) * in[1]; },
              {waves({5, 7}, 0.2), waves({5, 7}, 0.9)}, 1e-12);
}

TEST_CASE("gradients of the gated MLP reach its input, and its weights where they train") {
  check_alike(
      [](const Tensors& in) {
        return bs::swiglu(bs::Weights{{in.data() + 1, 5}}, {{0, 3}, {1, {}}, {2, 4}}, in[0]);
      },
      [](const Tensors& in) {
        const at::Tensor inner =
            at::silu(at::linear(in[0], in[1], in[4])) * at::linear(in[0], in[2]);
        return at::linear(inner, in[3], in[5]);
      },
      {waves({2, 3, 5}, 0.6), waves({7, 5}, 0.1), waves({7, 5}, 0.2), waves({5, 7}, 0.3),
       waves({7}, 0.4), waves({5}, 0.5)},
      1e-11);
}

TEST_CASE("gradients of heads that are split, turned and merged equal those of single operations") {
  const bool rotates = GENERATE(false, true);
  const bs::RotaryTable table = table_of(3, 4, at::kDouble);
  const auto split = [&](const Tensors& in) {
    return bs::split_heads(in[0], 2, 4, rotates ? &table : nullptr);
  };
  const auto defined = [&](const Tensors& in) {
    const at::Tensor heads = in[0].view({2, 3, 5, 4});
    return (rotates ? turned(heads, table) : heads).transpose(1, 2);
  };
  const Tensors rows{waves({6, 20}, 0.3)};
  CHECK(split(rows).sizes() == at::IntArrayRef{2, 5, 3, 4});
  check_alike(split, defined, rows, 1e-12);
  check_alike(split, defined, {waves({2, 3, 5, 4}, 0.4)}, 1e-12);
  check_alike([](const Tensors& in) { return bs::merge_heads(in[0]); },
              [](const Tensors& in) {
                return in[0].transpose(1, 2).reshape({6, 20});
              },
              {waves({2, 5, 3, 4}, 0.3)}, 0);
  CHECK(at::equal(bs::merge_heads(bs::split_heads(rows[0], 2, 4, nullptr)), rows[0]));
}

TEST_CASE("turning back undoes a rotation") {
  const bs::RotaryTable table = table_of(7, 6, at::kDouble);
  const at::Tensor x = waves({2, 7, 3, 6}, 0.3);
  const at::Tensor there = bs::rotate_half_split(x, table);
  CHECK(largest(there, turned(x, table)) < 1e-14);
  CHECK(largest(there, x) > 0.5);
  CHECK(largest(bs::rotate_back_half_split(there, table), x) < 1e-6);  // the table is made in f32
}

TEST_CASE("a hand-written gradient refuses second derivatives, second uses and changed inputs") {
  const at::Tensor gate = waves({2, 3}, 0.1).set_requires_grad(true);
  const at::Tensor up = waves({2, 3}, 0.2).set_requires_grad(true);
  const at::Tensor ones = waves({2, 3}, 0.3);
  const auto pull = [&](const at::Tensor& y, bool retain, bool create) {
    return torch::autograd::grad({y}, {gate, up}, {ones}, retain, create);
  };
  const at::Tensor y = bs::detail::gated(gate, up);
  CHECK_THROWS_WITH(pull(y, true, true),
                    ContainsSubstring("GatedBackward has no second derivative"));
  const Tensors first = pull(y, true, false);
  CHECK(at::equal(pull(y, false, false)[0], first[0]));
  CHECK_THROWS_WITH(pull(y, false, false), ContainsSubstring("retain_graph"));
  const at::Tensor z = bs::detail::gated(gate, up);
  up.detach().add_(1);
  CHECK_THROWS_WITH(pull(z, false, false), ContainsSubstring("modified by an inplace operation"));
}

TEST_CASE("nothing is recorded where no gradient is wanted") {
  const at::Tensor x = waves({2, 3}, 0.1, at::kFloat), weight = waves({3}, 0.2, at::kFloat);
  CHECK_FALSE(bs::rms_norm(x, weight, 1e-5).requires_grad());
  const at::Tensor leaf = x.clone().set_requires_grad(true);
  CHECK(bs::rms_norm(leaf, weight, 1e-5).requires_grad());
  const c10::NoGradGuard no_grad;
  CHECK_FALSE(bs::rms_norm(leaf, weight, 1e-5).requires_grad());
}
