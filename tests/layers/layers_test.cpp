// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/layers/attention.hpp>
#include <block_streamer/layers/kv_cache.hpp>
#include <block_streamer/layers/rms_norm.hpp>
#include <block_streamer/layers/rotary.hpp>
#include <block_streamer/layers/swiglu.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <vector>

#include <support/catch.hpp>
#include <support/waves.hpp>

namespace bs = block_streamer;
using support::largest;

namespace {

at::Tensor float_waves(at::IntArrayRef sizes, double seed) {
  return support::waves(sizes, seed, at::kFloat);
}

}  // namespace

namespace {

/// Values that look random, differ everywhere and need no generator.
/// softmax(q·kᵀ·scale)·v by its definition, in f64, for one mask of (T,S).
at::Tensor defined_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& mask) {
  const std::int64_t group = q.size(1) / k.size(1);
  const at::Tensor keys = k.repeat_interleave(group, 1).to(at::kDouble);
  const at::Tensor values = v.repeat_interleave(group, 1).to(at::kDouble);
  at::Tensor scores = q.to(at::kDouble).matmul(keys.transpose(2, 3)) / std::sqrt(q.size(3));
  scores = scores.masked_fill(mask.logical_not(), -INFINITY);
  return at::softmax(scores, -1).matmul(values);
}

at::Tensor causal_mask(std::int64_t past, std::int64_t tokens) {
  const at::Tensor key = at::arange(past + tokens);
  return key <= at::arange(past, past + tokens).unsqueeze(1);
}

}  // namespace

TEST_CASE("the norm rounds to the type of its input before it multiplies by the weight") {
  const at::Tensor x = float_waves({3, 5, 7}, 0.2);
  const at::Tensor weight = float_waves({7}, 0.9);
  const at::Tensor wide = x.to(at::kDouble);
  const at::Tensor expected =
      weight.to(at::kDouble) * wide / (wide.pow(2).mean(-1, true) + 1e-5).sqrt();
  CHECK(largest(bs::rms_norm(x, weight, 1e-5), expected) < 1e-6);

  const at::Tensor x16 = x.to(at::kBFloat16);
  const at::Tensor w16 = weight.to(at::kBFloat16);
  const at::Tensor wide16 = x16.to(at::kFloat);
  const at::Tensor unit = wide16 * (wide16.pow(2).mean(-1, true) + 1e-5).rsqrt();
  const at::Tensor twice = w16 * unit.to(at::kBFloat16);
  const at::Tensor once = (w16.to(at::kFloat) * unit).to(at::kBFloat16);
  CHECK(at::equal(bs::rms_norm(x16, w16, 1e-5), twice));
  CHECK_FALSE(at::equal(twice, once));
}

TEST_CASE("llama 3 frequencies equal the published check values") {
  const at::Tensor plain = bs::rotary_frequencies(128, 5e5);
  const at::Tensor by8 = bs::llama3_frequencies(plain, {8, 1, 4, 8192});
  const at::Tensor by32 = bs::llama3_frequencies(plain, {32, 1, 4, 8192});
  const auto near = [](const at::Tensor& f, int i, double expected) {
    CHECK(f[i].item<double>() == Approx(expected).epsilon(1e-6));
  };
  near(by8, 29, 2.166571e-3);
  near(by8, 34, 1.785078e-4);
  near(by8, 35, 9.556212e-5);
  near(by8, 63, 3.068926e-7);
  near(by32, 29, 2.118407e-3);
  near(by32, 34, 9.708288e-5);
  near(by32, 35, 2.389053e-5);
  for (int i = 0; i < 29; ++i) CHECK(by8[i].item<float>() == plain[i].item<float>());
  CHECK(by8[29].item<float>() != plain[29].item<float>());
}

TEST_CASE("b137_rotated_dot_products_depend_on_the_distance_only") {
  const at::Tensor frequencies = bs::rotary_frequencies(12, 1e4);
  const at::Tensor q = float_waves({1, 1, 1, 12}, 0.3);
  const at::Tensor k = float_waves({1, 1, 1, 12}, 0.8);
  const auto dot = [&](std::int64_t at_q, std::int64_t at_k) {
    const auto turned = [&](const at::Tensor& x, std::int64_t position) {
      const at::Tensor positions = at::full({1, 1}, position, at::TensorOptions{}.dtype(at::kLong));
      return bs::rotate_half_split(x, bs::rotary_table(positions, frequencies, at::kFloat));
    };
    return (turned(q, at_q) * turned(k, at_k)).sum().item<double>();
  };
  for (const std::int64_t distance : {0, 1, 7, 100}) {
    for (const std::int64_t position : {100, 513, 1024, 4096}) {
      CHECK(dot(position, position - distance) == Approx(dot(distance, 0)).margin(2e-3));
    }
  }
  CHECK(std::abs(dot(7, 0) - dot(0, 7)) > 0.01);
  CHECK(std::abs(dot(1, 0) - dot(2, 0)) > 0.01);
}

TEST_CASE("b137_half_split_rotation_turns_channel_i_with_channel_i_plus_half") {
  const at::Tensor frequencies = bs::rotary_frequencies(4, 100.0);  // 1, 0.1
  const at::Tensor positions = at::full({1, 1}, 3, at::TensorOptions{}.dtype(at::kLong));
  const at::Tensor x = at::arange(1, 5).to(at::kFloat).view({1, 1, 1, 4});
  const at::Tensor y =
      bs::rotate_half_split(x, bs::rotary_table(positions, frequencies, at::kFloat)).view({4});
  CHECK(y[0].item<double>() == Approx(1 * std::cos(3.0) - 3 * std::sin(3.0)));
  CHECK(y[2].item<double>() == Approx(3 * std::cos(3.0) + 1 * std::sin(3.0)));
  CHECK(y[1].item<double>() == Approx(2 * std::cos(0.3) - 4 * std::sin(0.3)));
  CHECK(y[3].item<double>() == Approx(4 * std::cos(0.3) + 2 * std::sin(0.3)));
}

TEST_CASE("angles are formed in float32 and each row has its own positions") {
  const at::Tensor frequencies = bs::rotary_frequencies(6, 1e4);
  const at::Tensor positions = at::tensor({0, 1, 4095, 7, 8, 9}, at::kLong).view({2, 3});
  const bs::RotaryTable table = bs::rotary_table(positions, frequencies, at::kBFloat16);
  CHECK(table.cos.sizes() == at::IntArrayRef{2, 3, 1, 6});
  CHECK(table.cos.scalar_type() == at::kBFloat16);
  const float angle = 4095.0F * frequencies[1].item<float>();
  const at::Tensor expected = at::full({}, angle).sin().to(at::kBFloat16);
  CHECK(table.sin[0][2][0][1].item<float>() == -expected.item<float>());
  CHECK(table.sin[0][2][0][4].item<float>() == expected.item<float>());
}

TEST_CASE("attention equals its definition with grouped heads, masks and a longer past") {
  for (const std::int64_t kv_heads : {1, 2, 6}) {
    for (const std::int64_t past : {0, 9}) {
      for (const std::int64_t tokens : {1, 5}) {
        INFO("kv heads " << kv_heads << ", past " << past << ", tokens " << tokens);
        const at::Tensor q = float_waves({2, 6, tokens, 10}, 0.1);
        const at::Tensor k = float_waves({2, kv_heads, past + tokens, 10}, 0.5);
        const at::Tensor v = float_waves({2, kv_heads, past + tokens, 10}, 0.7);
        const at::Tensor mask = causal_mask(past, tokens);
        const at::Tensor expected = defined_attention(q, k, v, mask);
        bs::AttentionTokens masked{past, {}, mask.unsqueeze(0).unsqueeze(0), false};
        CHECK(largest(bs::attend(q, k, v, masked), expected) < 2e-6);
        if (past == 0 || tokens == 1) {
          bs::AttentionTokens plain{past, {}, {}, tokens > 1};
          CHECK(largest(bs::attend(q, k, v, plain), expected) < 2e-6);
        }
      }
    }
  }
}

TEST_CASE("grouped heads give the same where LibTorch has to be given repeated ones") {
  const at::Tensor q = float_waves({2, 6, 5, 8}, 0.1), k = float_waves({2, 2, 5, 8}, 0.2),
                   v = float_waves({2, 2, 5, 8}, 0.3);
  const at::Tensor native = bs::detail::grouped_attention<true>(q, k, v, std::nullopt, true, 0.3);
  const at::Tensor repeated =
      bs::detail::grouped_attention<false>(q, k, v, std::nullopt, true, 0.3);
  CHECK(largest(native, repeated) < 1e-6);
  CHECK_NOTHROW(bs::detail::causal_kernel<false>(q, k, v));
}

TEST_CASE("the gated MLP is down of silu of gate times up") {
  const std::vector<at::Tensor> tensors{float_waves({7, 5}, 0.1), float_waves({7, 5}, 0.2),
                                        float_waves({5, 7}, 0.3), float_waves({7}, 0.4),
                                        float_waves({5}, 0.5)};
  const at::Tensor x = float_waves({2, 3, 5}, 0.6);
  const bs::Weights weights{tensors};
  const at::Tensor inner =
      at::silu(at::linear(x, tensors[0], tensors[3])) * at::linear(x, tensors[1]);
  CHECK(at::equal(bs::swiglu(weights, {{0, 3}, {1, {}}, {2, 4}}, x),
                  at::linear(inner, tensors[2], tensors[4])));
}

TEST_CASE("a cache keeps its addresses, its prefix and its room") {
  const c10::NoGradGuard no_grad;
  bs::KvCache cache{{2, 1, 2, 8, 3}, at::kFloat, at::kCPU};
  CHECK(cache.byte_count() == 2u * 2 * 1 * 2 * 8 * 3 * 4);
  const at::Tensor k = float_waves({1, 2, 5, 3}, 0.1);
  const at::Tensor v = float_waves({1, 2, 5, 3}, 0.2);
  const auto first = cache.append(0, 0, k, v);
  CHECK(cache.length() == 0);
  cache.append(1, 0, k, v);
  CHECK(cache.length() == 5);
  const auto second = cache.append(0, 5, k.narrow(2, 0, 3), v.narrow(2, 0, 3));
  CHECK(second.keys.const_data_ptr() == first.keys.const_data_ptr());
  CHECK(at::equal(second.keys, at::cat({k, k.narrow(2, 0, 3)}, 2)));
  CHECK(at::equal(second.values, at::cat({v, v.narrow(2, 0, 3)}, 2)));
  CHECK(cache.length() == 5);
  CHECK_THROWS_AS(cache.append(0, 8, k, v), bs::ContractViolation);
  CHECK_THROWS_AS(cache.append(1, 6, k.narrow(2, 0, 1), v.narrow(2, 0, 1)), bs::ContractViolation);
  CHECK_THROWS_AS(cache.append(1, 5, float_waves({2, 2, 1, 3}, 0), float_waves({2, 2, 1, 3}, 0)),
                  bs::ContractViolation);
  cache.truncate(2);
  CHECK(cache.length() == 2);
  CHECK(at::equal(cache.append(0, 2, k.narrow(2, 4, 1), v.narrow(2, 4, 1)).keys,
                  at::cat({k.narrow(2, 0, 2), k.narrow(2, 4, 1)}, 2)));
}

TEST_CASE("a cache refuses grad mode and works in inference mode") {
  bs::KvCache cache{{1, 1, 1, 4, 2}, at::kFloat, at::kCPU};
  const at::Tensor k = float_waves({1, 1, 1, 2}, 0.1);
  CHECK_THROWS_AS(cache.append(0, 0, k, k), bs::ContractViolation);
  {
    const c10::InferenceMode inference;
    cache.append(0, 0, k, k);
  }
  const c10::NoGradGuard no_grad;
  CHECK(cache.append(0, 1, k, k).keys.size(2) == 2);
}
