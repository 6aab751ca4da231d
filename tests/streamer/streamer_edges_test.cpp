// SPDX-License-Identifier: Apache-2.0
// Attempts to break the streamer. Run a case at a time.
#include "toy_model.hpp"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include <thread>
#include <utility>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::same_bits;
using support::ToyBlock;
using support::ToyContext;
using support::ToyModel;
using Host = support::ToyStreamer<bs::HostBackend>;

namespace {
Host make_host(const ToyModel& model, bs::HostMode mode = bs::HostMode::attached,
               const char* tier = "file") {
  return {model.blocks(), model.storage(tier), bs::HostBackend{mode}, support::toy_options(1)};
}
}  // namespace

TEST_CASE("s1 a dtype that is refused leaves the streamer usable") {
  const ToyModel model;
  auto streamer = make_host(model);
  ToyContext context;
  const auto x = support::toy_input();
  const auto expected = streamer.forward(x, context);
  CHECK_THROWS(streamer.to(bs::DType::i64));
  CHECK(same_bits(streamer.forward(x, context), expected));  // crashes
}

TEST_CASE("s2 a parameter frozen after attaching gets no gradient and does not stop the others") {
  const ToyModel model;
  auto streamer = make_host(model);
  const auto adapter = model.adapter();
  streamer.attach(adapter.table(model.lora_blocks()));
  streamer.parameters()[0].set_requires_grad(false);
  ToyContext context;
  const auto x = support::toy_input();
  CHECK_NOTHROW(streamer.train().forward(x, context).sum().backward());
  CHECK(!streamer.parameters()[0].grad().defined());
  CHECK(streamer.parameters()[1].grad().defined());
  for (auto& p : streamer.parameters()) p.set_requires_grad(false);
  CHECK(!streamer.forward(x, context).requires_grad());
}

TEST_CASE("s3 an output that the last block made as a view may be changed in place") {
  struct Viewer : ToyBlock {
    at::Tensor forward(const bs::Weights& w, const at::Tensor& x, ToyContext& c) {
      const auto y = ToyBlock::forward(w, x, c);
      return index == 5 ? y.view({1, 5, support::toy_width}) : y;
    }
  };
  const ToyModel model;
  std::vector<Viewer> blocks;
  for (const auto& b : model.blocks()) blocks.push_back({b});
  bs::Streamer streamer{std::move(blocks), model.storage("file"), bs::HostBackend{},
                        support::toy_options()};
  const auto adapter = model.adapter();
  streamer.attach(adapter.table(model.lora_blocks()));
  ToyContext context;
  auto y = streamer.train().forward(support::toy_input(), context);
  CHECK_NOTHROW(y.mul_(2));
  CHECK_NOTHROW(y.sum().backward());
  CHECK(streamer.parameters()[1].grad().defined());
}

TEST_CASE("s4 b96 adapters train under autocast, with the resident run's bits, evaluations first") {
  const ToyModel model;
  const auto adapter = model.adapter(1, 0.3);
  const auto table = adapter.table(model.lora_blocks());
  auto streamer = make_host(model);
  streamer.attach(adapter.table(model.lora_blocks()));
  ToyContext context;
  context.dropout = 0.3;
  auto blocks = model.blocks();
  const auto x = support::toy_input();
  const auto gradients = [&](const at::Tensor& loss) {
    loss.backward();
    std::vector<at::Tensor> all;
    for (const auto& p : adapter.parameters()) all.push_back(std::exchange(p.mutable_grad(), {}));
    return all;
  };
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::manual_seed(5);
  const auto expected = gradients(
      bs::resident_forward<ToyBlock>(blocks, model.resident(), x, context, &table, true).sum());
  CHECK_NOTHROW(streamer.eval().forward(x, context));
  at::manual_seed(5);
  const auto output = streamer.train().forward(x, context);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  const auto streamed = gradients(output.sum());
  at::manual_seed(5);
  const auto uncast = gradients(streamer.train().forward(x, context).sum());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CHECK(same_bits(streamed[i], expected[i]));
    CHECK(!same_bits(uncast[i], expected[i]));
  }
}

TEST_CASE("s5 retain_graph, two streamers in one graph, backward on another thread") {
  const ToyModel model;
  auto a = make_host(model), b = make_host(model, bs::HostMode::detached, "ram");
  const auto adapter = model.adapter();
  a.attach(adapter.table(model.lora_blocks()));
  b.attach(adapter.table(model.lora_blocks()));
  a.train(), b.train();
  ToyContext context;
  const auto x = support::toy_input();
  auto y = a.forward(b.forward(a.forward(x, context), context) + b.forward(x, context), context);
  auto loss = y.square().mean() + a.forward(x, context).square().mean();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = a.parameters()[1].grad().clone();
  std::thread other{[&] { loss.backward(); }};
  other.join();
  CHECK(same_bits(a.parameters()[1].grad(), once + once));
}

TEST_CASE("s6 a thousand forwards without a backward keep nothing") {
  const ToyModel model;
  auto streamer = make_host(model);
  const auto adapter = model.adapter();
  streamer.attach(adapter.table(model.lora_blocks()));
  streamer.train();
  auto guard = std::make_shared<int>(0);
  ToyContext context;
  context.before_block = [guard](std::size_t) {};
  const auto before = guard.use_count();
  for (int i = 0; i < 300; ++i) (void)streamer.forward(support::toy_input(), context);
  CHECK(guard.use_count() == before);
}

TEST_CASE("s7 mutation of weights is seen in InferenceMode, through views too") {
  struct Sneaky : ToyBlock {
    int how = 0;
    at::Tensor forward(const bs::Weights& w, const at::Tensor& x, ToyContext& c) {
      if (index == 1) {
        if (how == 0) w[0].add_(1);
        if (how == 1) w[0].view({-1}).add_(1);
        if (how == 2) w[0].detach().add_(1);
        if (how == 3) w[0].select(0, 0).zero_();
      }
      return ToyBlock::forward(w, x, c);
    }
  };
  const ToyModel model;
  for (int how = 0; how < 4; ++how) {
    std::vector<Sneaky> blocks;
    for (const auto& b : model.blocks()) blocks.push_back({b, how});
    bs::Streamer streamer{std::move(blocks), model.storage("file"), bs::HostBackend{},
                          support::toy_options()};
    ToyContext context;
    const c10::InferenceMode mode;
    INFO(how);
    CHECK_THROWS_WITH(streamer.forward(support::toy_input(), context),
                      ContainsSubstring("changed its weight"));
  }
}

TEST_CASE("s8 train mode without grad is still train mode") {
  const ToyModel model;
  auto streamer = make_host(model);
  const auto adapter = model.adapter(1, 0.9);
  streamer.attach(adapter.table(model.lora_blocks()));
  streamer.train();
  ToyContext context;
  const auto x = support::toy_input();
  const auto with_grad = streamer.forward(x, context).detach();
  const c10::NoGradGuard no_grad;
  const auto without = streamer.forward(x, context);
  streamer.eval();
  const auto evaluated = streamer.forward(x, context);
  CHECK(!same_bits(with_grad, evaluated));
  CHECK(!same_bits(without, evaluated));  // dropout was silently off
}

TEST_CASE("s9 drain from what observes the first forward") {
  const ToyModel model;
  auto streamer = make_host(model);
  ToyContext context;
  CHECK_NOTHROW(streamer.forward_observed(
      support::toy_input(), context, [&](bs::BlockId, const at::Tensor&) { streamer.drain(); }));
}

TEST_CASE("s10 statistics begin anew with a change of dtype") {
  const ToyModel model;
  auto streamer = make_host(model);
  ToyContext context;
  (void)streamer.forward(support::toy_input(), context);
  streamer.to(bs::DType::f64);
  (void)streamer.forward(support::toy_input(at::kDouble), context);
  CHECK(streamer.statistics().passes == 1);
}

TEST_CASE("s11 changing the input after a forward whose blocks return it") {
  const ToyModel model{bs::DType::f32, {0, 0, 0}};
  struct Pass : ToyBlock {
    at::Tensor forward(const bs::Weights&, const at::Tensor& x, ToyContext&) { return x; }
  };
  std::vector<Pass> blocks;
  for (const auto& b : model.blocks()) blocks.push_back({b});
  bs::Streamer streamer{std::move(blocks), model.storage("ram"), bs::HostBackend{},
                        support::toy_options()};
  ToyContext context;
  auto x = support::toy_input().set_requires_grad(true);
  auto y = streamer.train().forward(x * 1, context);
  CHECK_NOTHROW(y.sum().backward());
  CHECK(x.grad().defined());
  streamer.close();
  CHECK(streamer.eval().forward(x.detach(), context).defined());
}

TEST_CASE("s12 passes on the host are not recorded, and it is said why") {
  const ToyModel model;
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    auto streamer = make_host(model, mode, "ram");
    ToyContext context;
    const auto x = support::toy_input();
    const auto expected = streamer.forward(x, context);
    const auto check_refused = [](auto&& capture) {
      try {
        capture();
        FAIL("it was recorded");
      } catch (const bs::UnsupportedError& error) {
        CHECK(std::string{error.what()} ==
              "passes on cpu cannot be recorded in a graph: the device has none");
      }
    };
    check_refused([&] { (void)streamer.capture(); });
    check_refused([&] {
      (void)streamer.capture_step(
          [](const at::Tensor& y, std::span<const at::Tensor>) { return y.sum(); });
    });
    CHECK(same_bits(streamer.forward(x, context), expected));
  }
}
