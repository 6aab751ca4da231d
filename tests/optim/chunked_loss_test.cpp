// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <block_streamer/train/chunked_loss.hpp>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

/// The largest allocation and the most alive at once, of this thread on the CPU.
class Allocations final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    largest = std::max(largest, size);
    alive += size;
    peak = std::max(peak, alive);
  }
  void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }

  std::int64_t largest = 0, alive = 0, peak = 0;
};

template <class F>
Allocations allocations_of(F&& action) {
  const auto seen = std::make_shared<Allocations>();
  const c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, seen};
  action();
  return *seen;
}

constexpr std::int64_t V = 37, C = 8;

struct Case {
  explicit Case(at::ScalarType type = at::kFloat, std::int64_t batch = 3,
                std::int64_t tokens = 11) {
    at::manual_seed(4);
    hidden = at::randn({batch, tokens, C}).mul(2).to(type).set_requires_grad(true);
    head = at::randn({V, C}).to(type);
    const at::Tensor ids = at::randint(V, {batch, tokens}, at::kLong);
    at::Tensor trained = at::rand({batch, tokens}) < 0.6;
    trained[1].fill_(false);  // a row of which nothing counts
    targets = bs::token_targets(ids, trained);
  }
  [[nodiscard]] auto logits_of() const {
    return [this](const at::Tensor& some) { return at::linear(at::tanh(some), head); };
  }
  [[nodiscard]] bs::TokenLoss plain() const { return bs::token_loss(logits_of()(hidden), targets); }
  [[nodiscard]] bs::TokenLoss chunked(std::uint64_t rows) const {
    return bs::chunked_token_loss(logits_of(), hidden, targets, V,
                                  {.logits_byte_count = rows * V * 4});
  }
  at::Tensor gradient(const bs::TokenLoss& loss) const {
    hidden.mutable_grad() = at::Tensor{};
    (loss.sum / 7).backward();
    return hidden.grad().clone();
  }
  at::Tensor hidden, head;
  bs::TokenTargets targets;
};

}  // namespace

TEST_CASE("scored positions alone give the loss and gradients of all targets, bit for bit") {
  for (const std::int64_t rows : {1, 5, 1000}) {
    Case all, picked;
    bs::ChunkedLossOptions options;
    options.logits_byte_count = static_cast<std::uint64_t>(4 * V * rows);
    const auto one = bs::chunked_token_loss(all.logits_of(), all.hidden, all.targets, V, options);
    const bs::ScoredTokens scored = bs::scored_tokens(picked.targets, at::kCPU);
    const auto other =
        bs::chunked_token_loss(picked.logits_of(), picked.hidden, scored, V, options);
    one.sum.backward();
    other.sum.backward();
    CHECK(one.count == other.count);
    CHECK(at::equal(one.sum, other.sum));
    CHECK(at::equal(all.hidden.grad(), picked.hidden.grad()));
    CHECK(scored.positions.size(0) == static_cast<std::int64_t>(one.count));
  }
  Case wrong;
  const bs::ScoredTokens uneven{at::zeros({2}, at::kLong), at::zeros({3}, at::kLong)};
  CHECK_THROWS_AS(bs::chunked_token_loss(wrong.logits_of(), wrong.hidden, uneven, V),
                  bs::ContractViolation);
}

TEST_CASE("a chunked loss and its gradient are those of the plain one, whatever the chunk") {
  const Case c;
  const bs::TokenLoss plain = c.plain();
  const at::Tensor gradient = c.gradient(plain);
  CHECK(plain.count > 4);
  for (const std::uint64_t rows : {0, 1, 2, 5, 7, 1000}) {
    CAPTURE(rows);
    const bs::TokenLoss chunked = c.chunked(rows);
    CHECK(chunked.count == plain.count);
    CHECK(chunked.sum.scalar_type() == at::kFloat);
    CHECK(chunked.sum.item<double>() == Approx(plain.sum.item<double>()).epsilon(1e-6));
    const at::Tensor own = c.gradient(chunked);
    CHECK(at::allclose(own, gradient, 1e-5, 1e-6));
    const at::Tensor scored = c.targets.targets.ne(bs::unscored);
    CHECK(own.abs().sum(2).ne(0).logical_xor(scored).sum().item<int>() == 0);
  }
}

TEST_CASE("in half types the chunked loss differs from the plain one by roundings of the type") {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const Case c{type};
    const double unit = type == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
    const bs::TokenLoss plain = c.plain(), chunked = c.chunked(4);
    CHECK(chunked.sum.item<double>() == Approx(plain.sum.item<double>()).epsilon(1e-5));
    const at::Tensor exact = c.gradient(plain).to(at::kDouble);
    CHECK(c.gradient(chunked).scalar_type() == type);
    const double off =
        (c.gradient(c.chunked(4)).to(at::kDouble) - exact).abs().max().item<double>();
    CHECK(off < 8 * unit * exact.abs().max().item<double>());
  }
}

TEST_CASE("what the head trains gets its gradient summed over the chunks") {
  Case c;
  c.head.set_requires_grad(true);
  const at::Tensor of_hidden = c.gradient(c.plain());
  const at::Tensor of_head = c.head.grad().clone();
  c.head.mutable_grad() = at::Tensor{};
  CHECK(at::allclose(c.gradient(c.chunked(3)), of_hidden, 1e-5, 1e-6));
  CHECK(at::allclose(c.head.grad(), of_head, 1e-5, 1e-6));
  c.head.mutable_grad() = at::Tensor{};
  c.hidden.set_requires_grad(false);  // the head alone trains
  (c.chunked(3).sum / 7).backward();
  CHECK(at::allclose(c.head.grad(), of_head, 1e-5, 1e-6));
}

TEST_CASE("a chunked loss has a history only where gradients are wanted") {
  Case c;
  {
    const c10::NoGradGuard no_grad;
    CHECK_FALSE(c.chunked(3).sum.requires_grad());
    CHECK(c.chunked(3).sum.item<double>() == Approx(c.plain().sum.item<double>()).epsilon(1e-6));
  }
  CHECK(c.chunked(3).sum.requires_grad());
  c.hidden.set_requires_grad(false);
  CHECK_FALSE(c.chunked(3).sum.requires_grad());
}

TEST_CASE("nothing that is scored is a loss of nothing with a gradient of zeros") {
  Case c;
  c.targets.targets.fill_(bs::unscored);
  c.targets.count = 0;
  const bs::TokenLoss loss = c.chunked(3);
  CHECK(loss.sum.item<double>() == 0);
  CHECK(c.gradient(loss).eq(0).all().item<bool>());
}

TEST_CASE("large logits do not overflow, and one that is not finite shows in the loss") {
  Case c;
  c.head.mul_(1e6);
  CHECK(c.chunked(2).sum.item<double>() == Approx(c.plain().sum.item<double>()).epsilon(1e-5));
  c.head[5].fill_(std::numeric_limits<float>::quiet_NaN());
  CHECK(std::isnan(c.chunked(2).sum.item<double>()));
}

TEST_CASE("neither pass allocates tokens times vocabulary, and unscored tokens take nothing") {
  at::manual_seed(4);
  constexpr std::int64_t tokens = 400, vocabulary = 3000, chunk = 20;
  const at::Tensor head = at::randn({vocabulary, C});
  const auto logits_of = [&](const at::Tensor& some) { return at::linear(some, head); };
  const at::Tensor hidden = at::randn({1, tokens, C}).set_requires_grad(true);
  const at::Tensor ids = at::randint(vocabulary, {1, tokens}, at::kLong);
  at::Tensor trained = at::ones({1, tokens}, at::kBool);
  const auto both = [&](auto&& loss) { return allocations_of([&] { loss().sum.backward(); }); };
  const bs::ChunkedLossOptions options{.logits_byte_count = chunk * vocabulary * 4};
  const auto targets = bs::token_targets(ids, trained);
  const Allocations plain = both([&] { return bs::token_loss(logits_of(hidden), targets); });
  CHECK(plain.largest >= tokens * vocabulary * 4);  // the counter counts
  const Allocations chunked =
      both([&] { return bs::chunked_token_loss(logits_of, hidden, targets, vocabulary, options); });
  CHECK(chunked.largest == chunk * vocabulary * 4);
  CHECK(chunked.peak < 3 * chunk * vocabulary * 4);
  trained.narrow(1, 0, tokens - 5).fill_(false);
  const auto few = bs::token_targets(ids, trained);
  const Allocations completion =
      both([&] { return bs::chunked_token_loss(logits_of, hidden, few, vocabulary, options); });
  CHECK(completion.largest == 5 * vocabulary * 4);
}

TEST_CASE("the backward of a chunked loss runs once, unless it is kept") {
  const Case c;
  const bs::TokenLoss loss = c.chunked(3);
  loss.sum.backward({}, /*retain_graph=*/true);
  loss.sum.backward();
  CHECK_THROWS_WITH(loss.sum.backward(), ContainsSubstring("backward has run"));
}
