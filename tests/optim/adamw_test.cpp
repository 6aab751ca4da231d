// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/optim/adamw_state.hpp>
#include <block_streamer/optim/external_optimizer.hpp>
#include <block_streamer/optim/gradient_norm.hpp>
#include <block_streamer/optim/no_optimizer.hpp>
#include <block_streamer/optim/schedule.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <limits>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

/// Values that depend on their place and on `salt`; odd sizes.
at::Tensor values(at::IntArrayRef sizes, double salt) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return at::arange(count, at::kDouble)
      .mul(0.37)
      .add(salt)
      .sin()
      .mul(0.5)
      .to(at::kFloat)
      .view(sizes);
}

std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> list;
  for (int i = 0; i < 8; ++i) list.push_back(values({3 + i, 7}, 10.0 * i).set_requires_grad(true));
  return list;
}

/// Gradient of parameter i at a step; block 5 has none at steps 2 and 4.
at::Tensor gradient(const at::Tensor& parameter, int i, int step) {
  if (i == 5 && (step == 2 || step == 4)) return {};
  return values(parameter.sizes(), 100.0 * step + i).mul(0.1);
}

/// The textbook update in double, to measure both implementations against.
struct Reference {
  at::Tensor p, m, v;
  int step = 0;
  void update(const at::Tensor& g32, double lr, const bs::AdamWOptions& o) {
    const at::Tensor g = g32.to(at::kDouble);
    if (!m.defined()) {
      m = at::zeros_like(p);
      v = at::zeros_like(p);
    }
    ++step;
    p.mul_(1 - lr * o.weight_decay);
    m.mul_(o.beta1).add_(g, 1 - o.beta1);
    v.mul_(o.beta2).addcmul_(g, g, 1 - o.beta2);
    const at::Tensor m_hat = m.div(1 - std::pow(o.beta1, step));
    const at::Tensor v_hat = v.div(1 - std::pow(o.beta2, step));
    p.sub_(m_hat.div(v_hat.sqrt().add(o.epsilon)).mul(lr));
  }
};

double distance(const at::Tensor& a, const at::Tensor& b) {
  return a.detach().to(at::kDouble).sub(b.detach().to(at::kDouble)).abs().max().item<double>();
}

}  // namespace

TEST_CASE("AdamW equals torch's over 20 steps, fused and plain") {
  const bool fused = GENERATE(true, false);
  CAPTURE(fused);
  std::vector<at::Tensor> ours = parameters();
  std::vector<at::Tensor> theirs = parameters();
  bs::AdamW optimizer{{.weight_decay = 0.1, .allow_fused = fused}};
  torch::optim::AdamW reference{theirs, torch::optim::AdamWOptions{3e-3}.weight_decay(0.1)};
  for (int step = 1; step <= 20; ++step) {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      ours[i].mutable_grad() = gradient(ours[i], static_cast<int>(i), step);
      theirs[i].mutable_grad() = gradient(theirs[i], static_cast<int>(i), step);
    }
    optimizer.step(ours, {.step = static_cast<std::uint64_t>(step), .learning_rate = 3e-3});
    reference.step();
  }
  for (std::size_t i = 0; i < ours.size(); ++i) {
    CAPTURE(i);
    CHECK(distance(ours[i], theirs[i]) < 1e-6);        // the orders of rounding differ
    CHECK(distance(ours[i], parameters()[i]) > 1e-3);  // it did train
  }
}

TEST_CASE("b116 blocks stepped one after another equal one step over the whole model bit for bit") {
  const bool fused = GENERATE(true, false);
  const bool backwards = GENERATE(true, false);
  std::vector<at::Tensor> whole = parameters();
  std::vector<at::Tensor> split = parameters();
  std::vector<Reference> exact;
  for (const at::Tensor& p : whole) exact.push_back({p.detach().to(at::kDouble), {}, {}});
  bs::AdamW one{{.allow_fused = fused}};
  bs::AdamW many{{.allow_fused = fused}};
  for (int step = 1; step <= 5; ++step) {
    const bs::StepContext context{.step = static_cast<std::uint64_t>(step), .learning_rate = 0.01};
    if (step == 3) {  // betas changed on the way
      one.set_options({.beta1 = 0.8, .beta2 = 0.99, .allow_fused = fused});
      many.set_options({.beta1 = 0.8, .beta2 = 0.99, .allow_fused = fused});
    }
    std::vector<at::Tensor> gradients;
    for (int i = 0; i < 8; ++i)
      gradients.push_back(gradient(whole[static_cast<std::size_t>(i)], i, step));
    for (std::size_t i = 0; i < 8; ++i)
      if (gradients[i].defined()) exact[i].update(gradients[i], 0.01, one.options());
    many.begin_step(context);
    for (std::size_t k = 0; k < 8; ++k) {
      const std::size_t i = backwards ? 7 - k : k;
      std::vector<at::Tensor> p{split[i]};
      std::vector<at::Tensor> g{gradients[i]};
      many.prefetch(bs::block_at(i));
      many.update(bs::block_at(i), p, g);
    }
    many.end_step();
    one.begin_step(context);
    one.update(bs::BlockId{0}, whole, gradients);
    one.end_step();
  }
  for (std::size_t i = 0; i < 8; ++i) {
    CAPTURE(i);
    CHECK(at::equal(whole[i], split[i]));
    CHECK(distance(whole[i], exact[i].p) < 2e-7 * 5);
    CHECK(one.moments()[i].step == (i == 5 ? 3U : 5U));
    CHECK(many.moments(bs::block_at(i))[0].step == (i == 5 ? 3U : 5U));
  }
}

TEST_CASE("b116 a parameter without a gradient keeps its bits, its moments and its count") {
  std::vector<at::Tensor> p = parameters();
  bs::AdamW optimizer{{.weight_decay = 0.5}};
  for (std::size_t i = 0; i < 8; ++i) p[i].mutable_grad() = gradient(p[i], static_cast<int>(i), 1);
  optimizer.step(p, {.step = 1, .learning_rate = 0.1});
  const at::Tensor before = p[5].detach().clone();
  const at::Tensor moment = optimizer.moments()[5].exp_avg.clone();
  p[5].mutable_grad() = at::Tensor{};
  optimizer.step(p, {.step = 2, .learning_rate = 0.1});
  CHECK(at::equal(p[5], before));
  CHECK(at::equal(optimizer.moments()[5].exp_avg, moment));
  CHECK(optimizer.moments()[5].step == 1);
  CHECK(optimizer.moments()[4].step == 2);
}

TEST_CASE("a step is seen by autograd: a graph over the old values refuses to run backward") {
  const bool fused = GENERATE(true, false);
  std::vector<at::Tensor> p{values({5, 3}, 1).set_requires_grad(true)};
  const at::Tensor loss = p[0].square().sum();
  p[0].mutable_grad() = values({5, 3}, 2);
  bs::AdamW optimizer{{.allow_fused = fused}};
  optimizer.step(p, {.learning_rate = 0.1});
  CHECK_THROWS(loss.backward());
}

TEST_CASE("the gradient scale equals gradients scaled beforehand") {
  const bool fused = GENERATE(true, false);
  std::vector<at::Tensor> a{values({5, 3}, 1).set_requires_grad(true)};
  std::vector<at::Tensor> b{values({5, 3}, 1).set_requires_grad(true)};
  bs::AdamW left{{.allow_fused = fused}};
  bs::AdamW right{{.allow_fused = fused}};
  for (int step = 1; step <= 3; ++step) {
    a[0].mutable_grad() = values({5, 3}, step);
    b[0].mutable_grad() = values({5, 3}, step).mul(0.25);
    left.step(a, {.learning_rate = 0.1, .gradient_scale = 0.25});
    right.step(b, {.learning_rate = 0.1});
  }
  CHECK(at::equal(a[0], b[0]));
}

TEST_CASE("a bf16 parameter has fp32 moments and follows the fp32 run within its rounding") {
  std::vector<at::Tensor> narrow{values({5, 3}, 1).to(at::kBFloat16).set_requires_grad(true)};
  std::vector<at::Tensor> wide{narrow[0].detach().to(at::kFloat).set_requires_grad(true)};
  bs::AdamW left;
  bs::AdamW right;
  narrow[0].mutable_grad() = values({5, 3}, 2).to(at::kBFloat16);
  wide[0].mutable_grad() = narrow[0].grad().to(at::kFloat);
  left.step(narrow, {.learning_rate = 0.1});
  right.step(wide, {.learning_rate = 0.1});
  CHECK(left.moments()[0].exp_avg.scalar_type() == at::kFloat);
  CHECK(distance(narrow[0], wide[0]) < 4e-3);
}

TEST_CASE("b119 a saved state resumes bit for bit and keeps its dtype") {
  const bool narrow = GENERATE(false, true);
  const auto dtype = narrow ? at::kBFloat16 : at::kFloat;
  const auto start = [&] {
    std::vector<at::Tensor> list;
    for (const at::Tensor& p : parameters())
      list.push_back(p.detach().to(dtype).set_requires_grad(true));
    return list;
  };
  const auto train = [&](bs::AdamW& optimizer, std::vector<at::Tensor>& list, int from, int to) {
    for (int step = from; step <= to; ++step) {
      for (std::size_t i = 0; i < 8; ++i) {
        const at::Tensor g = gradient(list[i], static_cast<int>(i), step);
        list[i].mutable_grad() = g.defined() ? g.to(dtype) : g;
      }
      optimizer.step(list, {.step = static_cast<std::uint64_t>(step), .learning_rate = 0.02});
    }
  };
  std::vector<std::string> names;
  for (int i = 0; i < 8; ++i) names.push_back("layer" + std::to_string(i));
  std::vector<at::Tensor> straight = start();
  bs::AdamW uninterrupted;
  train(uninterrupted, straight, 1, 10);

  std::vector<at::Tensor> resumed = start();
  bs::NamedTensors saved;
  {
    bs::AdamW first;
    train(first, resumed, 1, 5);
    for (const auto& [name, tensor] : bs::adamw_state(first, names))
      saved.push_back({name, tensor.clone()});
  }
  CHECK(saved.size() == 24);
  CHECK(saved[0].name == "layer0.exp_avg");
  CHECK(saved[0].tensor.scalar_type() == at::kFloat);
  CHECK(saved[2].tensor.scalar_type() == at::kLong);
  bs::AdamW second;
  bs::load_adamw_state(second, names, resumed, saved);
  CHECK(second.moments()[5].step == 3);
  train(second, resumed, 6, 10);
  for (std::size_t i = 0; i < 8; ++i) CHECK(at::equal(straight[i], resumed[i]));
}

TEST_CASE("b120 counts stay exact integers across the limits of narrow floats") {
  const std::uint64_t count = GENERATE(255U, 256U, 257U, 100000U, 16777217U);
  std::vector<at::Tensor> p{values({3}, 1).set_requires_grad(true)};
  const bs::NamedTensors saved{
      {"w.exp_avg", at::full({3}, 0.01, at::kFloat)},
      {"w.exp_avg_sq", at::full({3}, 1e-4, at::kFloat)},
      {"w.step", at::scalar_tensor(static_cast<std::int64_t>(count), at::kLong)}};
  bs::AdamW optimizer;
  const std::vector<std::string> names{"w"};
  bs::load_adamw_state(optimizer, names, p, saved);
  p[0].mutable_grad() = values({3}, 2);
  Reference exact{p[0].detach().to(at::kDouble), saved[0].tensor.to(at::kDouble),
                  saved[1].tensor.to(at::kDouble), static_cast<int>(count)};
  optimizer.step(p, {.step = count + 1, .learning_rate = 0.1});
  exact.update(values({3}, 2), 0.1, optimizer.options());
  CHECK(optimizer.moments()[0].step == count + 1);
  CHECK(bs::adamw_state(optimizer, names)[2].tensor.item<std::int64_t>() ==
        static_cast<std::int64_t>(count + 1));
  CHECK(distance(p[0], exact.p) < 1e-6);
}

TEST_CASE("b119 a state of another dtype, shape or name is refused and changes nothing") {
  std::vector<at::Tensor> p{values({3}, 1).set_requires_grad(true)};
  const std::vector<std::string> names{"w"};
  const bs::NamedTensors good{{"w.exp_avg", at::zeros({3}, at::kFloat)},
                              {"w.exp_avg_sq", at::zeros({3}, at::kFloat)},
                              {"w.step", at::scalar_tensor(std::int64_t{4}, at::kLong)}};
  bs::AdamW optimizer;
  bs::NamedTensors bad = good;
  SECTION("narrow moments") {
    bad[0].tensor = bad[0].tensor.to(at::kBFloat16);
  }
  SECTION("shape") {
    bad[1].tensor = at::zeros({4}, at::kFloat);
  }
  SECTION("a float step") {
    bad[2].tensor = at::scalar_tensor(4.0, at::kFloat);
  }
  SECTION("missing") {
    bad.erase(bad.begin() + 1);
  }
  SECTION("unknown") {
    bad.push_back({"other.step", good[2].tensor});
  }
  CHECK_THROWS_AS(bs::load_adamw_state(optimizer, names, p, bad), bs::BindingError);
  CHECK(optimizer.moments().empty());
  bs::load_adamw_state(optimizer, names, p, good);
  CHECK(optimizer.moments()[0].step == 4);
}

TEST_CASE("misuse of the step protocol is a contract violation") {
  std::vector<at::Tensor> p{values({3}, 1).set_requires_grad(true)};
  std::vector<at::Tensor> g{values({3}, 2)};
  bs::AdamW optimizer;
  CHECK_THROWS_AS(optimizer.update(bs::BlockId{0}, p, g), bs::ContractViolation);
  CHECK_THROWS_AS(optimizer.end_step(), bs::ContractViolation);
  optimizer.begin_step({.learning_rate = 0.1});
  CHECK_THROWS_AS(optimizer.begin_step({}), bs::ContractViolation);
  optimizer.update(bs::BlockId{0}, p, g);
  CHECK_THROWS_AS(optimizer.update(bs::BlockId{0}, p, g), bs::ContractViolation);
  std::vector<at::Tensor> wrong{values({4}, 2)};
  CHECK_THROWS_AS(optimizer.update(bs::BlockId{1}, p, wrong), bs::ContractViolation);
  optimizer.end_step();
  CHECK(optimizer.moments()[0].step == 1);
}

TEST_CASE("the gradient norm is that of one long vector, and clipping brings it down") {
  const std::vector<at::Tensor> g{values({3, 5}, 1), at::Tensor{}, values({7}, 2)};
  const double exact = std::sqrt(g[0].to(at::kDouble).square().sum().item<double>() +
                                 g[2].to(at::kDouble).square().sum().item<double>());
  CHECK(bs::global_gradient_norm(g) == Approx(exact).epsilon(1e-6));
  CHECK(bs::clip_factor(4, 1) == Approx(0.25).epsilon(1e-5));
  CHECK(bs::clip_factor(0.5, 1) == 1);
  CHECK(std::isnan(bs::global_gradient_norm(
      std::vector<at::Tensor>{at::full({2}, std::numeric_limits<float>::quiet_NaN())})));
  CHECK_THROWS_AS(bs::clip_factor(std::numeric_limits<double>::infinity(), 1),
                  bs::ContractViolation);
}

TEST_CASE("schedules start at zero under warm-up, peak after it and end at zero") {
  using bs::ScheduleShape;
  const bs::Schedule constant{ScheduleShape::constant, 2.0, 4, 0};
  CHECK(bs::learning_rate_at(constant, 1) == 0);
  CHECK(bs::learning_rate_at(constant, 3) == 1.0);
  CHECK(bs::learning_rate_at(constant, 5) == 2.0);
  CHECK(bs::learning_rate_at(constant, 1000) == 2.0);
  const bs::Schedule linear{ScheduleShape::linear, 2.0, 2, 12};
  CHECK(bs::learning_rate_at(linear, 3) == 2.0);
  CHECK(bs::learning_rate_at(linear, 8) == Approx(1.0));
  CHECK(bs::learning_rate_at(linear, 13) == 0);
  const bs::Schedule cosine{ScheduleShape::cosine, 2.0, 2, 12};
  CHECK(bs::learning_rate_at(cosine, 3) == 2.0);
  CHECK(bs::learning_rate_at(cosine, 8) == Approx(1.0));
  CHECK(bs::learning_rate_at(cosine, 5) == Approx(1.0 + std::cos(std::acos(-1.0) * 0.2)));
  CHECK(bs::learning_rate_at(cosine, 13) == 0);
  CHECK(bs::learning_rate_at(bs::Schedule{.peak = 3}, 1) == 3);
}
