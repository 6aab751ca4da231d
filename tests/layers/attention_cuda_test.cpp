// SPDX-License-Identifier: Apache-2.0
// Attention on a CUDA device: results, and which kernels they come from. Skips, saying why, where
// there is no device.
#include <block_streamer/layers/attention.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <support/catch.hpp>
#include <support/cuda.hpp>

namespace bs = block_streamer;

namespace {

thread_local std::map<std::string, int>* counted = nullptr;

/// How often each operator of LibTorch is called on this thread by `work`.
template <class Work>
std::map<std::string, int> operators_of(const Work& work) {
  std::map<std::string, int> calls;
  counted = &calls;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback{
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        ++(*counted)[function.name()];
        return nullptr;
      }});
  work();
  at::removeCallback(handle);
  counted = nullptr;
  return calls;
}

struct Heads {
  at::Tensor q, k, v;  ///< (B,8,T,64), (B,2,T,64) twice

  static Heads random(std::int64_t batch, std::int64_t queries, std::int64_t keys,
                      at::ScalarType dtype) {
    const auto make = [&](std::int64_t heads, std::int64_t tokens) {
      return at::randn({batch, heads, tokens, 64}, at::TensorOptions().device(support::cuda))
          .to(dtype);
    };
    return {make(8, queries), make(2, keys), make(2, keys)};
  }
  [[nodiscard]] Heads leaves(at::ScalarType dtype) const {
    const auto leaf = [dtype](const at::Tensor& t) {
      return t.detach().to(dtype).set_requires_grad(true);
    };
    return {leaf(q), leaf(k), leaf(v)};
  }
};

double relative_error(const at::Tensor& got, const at::Tensor& exact) {
  return ((got.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

}  // namespace

TEST_CASE("cuda: packed sequences attend in one kernel, and as each sequence alone") {
  if (!support::cuda_usable()) return;
  const std::vector<std::int64_t> lengths{7, 1, 120, 33};
  const auto packed = bs::PackedSequences::of(lengths, support::cuda);
  const bs::AttentionTokens tokens{0, {}, {}, false, packed};
  for (const auto& [dtype, tolerance] :
       {std::pair{at::kBFloat16, 1e-2}, {at::kHalf, 1.5e-3}, {at::kFloat, 1e-5}}) {
    const Heads given = Heads::random(1, 161, 161, dtype);
    const Heads ours = given.leaves(dtype), exact = given.leaves(at::kDouble);
    at::Tensor result;
    const auto calls = operators_of([&] { result = bs::attend(ours.q, ours.k, ours.v, tokens); });
    const bool one_kernel = dtype != at::kFloat;
    CHECK(calls.count("aten::_flash_attention_forward") == (one_kernel ? 1U : 0U));
    CHECK(calls.count("aten::scaled_dot_product_attention") == (one_kernel ? 0U : 1U));
    const at::Tensor reference =
        bs::detail::attend_one_by_one(exact.q, exact.k, exact.v, packed, 1 / std::sqrt(64.0));
    CHECK(relative_error(result, reference) < tolerance);
    const at::Tensor pull = at::randn(result.sizes(), reference.options());
    (result.to(at::kDouble) * pull).sum().backward();
    (reference * pull).sum().backward();
    CHECK(relative_error(ours.q.grad(), exact.q.grad()) < 2 * tolerance);
    CHECK(relative_error(ours.k.grad(), exact.k.grad()) < 2 * tolerance);
    CHECK(relative_error(ours.v.grad(), exact.v.grad()) < 2 * tolerance);
  }
}

TEST_CASE("cuda: one token of each sequence takes the kernel that does not plan for a length") {
  if (!support::cuda_usable()) return;
  const c10::NoGradGuard no_grad;
  const Heads given = Heads::random(3, 1, 77, at::kBFloat16);
  at::Tensor result;
  const auto calls = operators_of([&] { result = bs::attend(given.q, given.k, given.v, {}); });
  CHECK(calls.count("aten::_scaled_dot_product_cudnn_attention") == 0);
  CHECK(calls.count("aten::_scaled_dot_product_flash_attention") == 1);
  const at::Tensor exact = bs::detail::grouped_attention(
      given.q.to(at::kDouble), given.k.to(at::kDouble), given.v.to(at::kDouble), std::nullopt,
      false, 1 / std::sqrt(64.0));
  CHECK(relative_error(result, exact) < 1e-2);
}
