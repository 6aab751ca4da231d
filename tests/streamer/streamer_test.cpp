// SPDX-License-Identifier: Apache-2.0
#include "toy_model.hpp"

#include <c10/core/InferenceMode.h>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::same_bits;
using support::ToyBlock;
using support::ToyContext;
using support::ToyModel;
using Host = support::ToyStreamer<bs::HostBackend>;

namespace {

Host make(const ToyModel& model, std::uint32_t ahead = 1,
          bs::HostMode mode = bs::HostMode::detached) {
  return {model.blocks(), model.storage("file"), bs::HostBackend{mode},
          support::toy_options(ahead)};
}

/// A block list over the toy's storage that misbehaves in one way.
struct Rogue : ToyBlock {
  enum class What {
    nothing,
    add_in_place,
    resize,
    replace,
    alias,
    alias_part,
    change_input
  } what = What::nothing;
  at::Tensor forward(const bs::Weights& weights, const at::Tensor& x, ToyContext& context) {
    if (index != 1) return ToyBlock::forward(weights, x, context);
    switch (what) {
      case What::add_in_place:
        weights[0].add_(1);
        break;
      case What::resize:
        weights[0].resize_({1, 1});
        break;
      case What::replace:
        weights[0].set_data(at::zeros_like(weights[0]));
        break;
      case What::change_input:
        const_cast<at::Tensor&>(x).mul_(2);
        break;
      case What::alias:
        return weights[2].t();  // (inner, C)
      case What::alias_part:
        return weights[2].t().narrow(0, 0, 5);
      case What::nothing:
        break;
    }
    return ToyBlock::forward(weights, x, context);
  }
};
using RogueStreamer = bs::Streamer<Rogue, bs::AnyStorage, bs::ExternalOptimizer, bs::HostBackend>;

RogueStreamer make_rogue(const ToyModel& model, Rogue::What what) {
  std::vector<Rogue> blocks;
  for (const ToyBlock& block : model.blocks()) blocks.push_back({block, what});
  return {std::move(blocks), model.storage("file"), bs::HostBackend{}, support::toy_options()};
}

}  // namespace

TEST_CASE("a block that changes what it was lent is caught, and the streamer works afterwards") {
  const ToyModel model;
  const auto x = support::toy_input();
  ToyContext context;
  auto good = make(model);
  const auto expected = good.forward(x, context);
  for (const auto what :
       {Rogue::What::add_in_place, Rogue::What::replace, Rogue::What::change_input}) {
    auto streamer = make_rogue(model, what);
    for (int again = 0; again < 2; ++again) {
      CHECK_THROWS_WITH(streamer.forward(x.clone(), context),
                        ContainsSubstring("block 1 changed its"));
    }
    CHECK(streamer.statistics().resident_blocks <= 2);
  }
  auto resizing = make_rogue(model, Rogue::What::resize);
  CHECK_THROWS(resizing.forward(x, context));  // the block's own kernels refuse first
  // The spoilt bytes are not used again, even where the block stays resident.
  struct Once : ToyBlock {
    std::shared_ptr<bool> spoil;
    at::Tensor forward(const bs::Weights& weights, const at::Tensor& x, ToyContext& context) {
      if (index == 1 && std::exchange(*spoil, false)) {
        weights[0].zero_();
        throw std::runtime_error{"spoilt, then failed"};
      }
      return ToyBlock::forward(weights, x, context);
    }
  };
  auto spoil = std::make_shared<bool>(true);
  std::vector<Once> blocks;
  for (const ToyBlock& block : model.blocks()) blocks.push_back({block, spoil});
  auto options = support::toy_options();
  options.device_budget = 1 << 20;
  bs::Streamer streamer{std::move(blocks), model.storage("file"), bs::HostBackend{}, options};
  CHECK_THROWS_WITH(streamer.forward(x, context), ContainsSubstring("spoilt"));
  CHECK(same_bits(streamer.forward(x, context), expected));
}

TEST_CASE("an output that aliases a slot is copied out of it, only then") {
  const ToyModel model;
  ToyContext context;
  for (const auto what : {Rogue::What::alias, Rogue::What::alias_part}) {
    auto streamer = make_rogue(model, what);
    const auto x = support::toy_input();
    const auto first = streamer.forward(x, context).clone();
    CHECK(same_bits(streamer.forward(x, context), first));
    CHECK(first.isfinite().all().item<bool>());
  }
  struct Last : ToyBlock {
    at::Tensor forward(const bs::Weights& weights, const at::Tensor& x, ToyContext& context) {
      return index == 5 ? weights[0] : ToyBlock::forward(weights, x, context);
    }
  };
  std::vector<Last> blocks;
  for (const ToyBlock& block : model.blocks()) blocks.push_back({block});
  at::Tensor kept;
  {
    bs::Streamer streamer{std::move(blocks), model.storage("file"), bs::HostBackend{},
                          support::toy_options()};
    kept = streamer.forward(support::toy_input(), context);
  }
  CHECK(same_bits(kept, model.resident()[5][0]));  // b147: it outlives the streamer
}

TEST_CASE("reentrant and overlapping calls are refused by name") {
  const ToyModel model;
  auto streamer = make(model);
  ToyContext context;
  const auto x = support::toy_input();
  context.before_block = [&](std::size_t i) {
    if (i == 2) {
      ToyContext inner;
      (void)streamer.forward(x, inner);
    }
  };
  CHECK_THROWS_WITH(streamer.forward(x, context), ContainsSubstring("in use"));
  context.before_block = {};
  CHECK(streamer.forward(x, context).isfinite().all().item<bool>());
}

TEST_CASE(
    "an exception of a block passes through and leaves the streamer usable, in forward and "
    "backward") {
  const ToyModel model;
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    auto streamer = make(model, 1, mode);
    const auto adapter = model.adapter();
    streamer.attach(adapter.table(model.lora_blocks()));
    streamer.train();
    ToyContext context;
    const auto x = support::toy_input();
    context.before_block = [](std::size_t i) {
      if (i == 3) throw std::runtime_error{"block 3 is tired"};
    };
    CHECK_THROWS_WITH(streamer.forward(x, context), ContainsSubstring("block 3 is tired"));
    int calls = 0;
    context.before_block = [&calls](std::size_t) {
      if (++calls == 8) throw std::runtime_error{"tired in backward"};
    };
    auto output = streamer.forward(x, context);
    CHECK_THROWS_WITH(output.sum().backward(), ContainsSubstring("tired in backward"));
    context.before_block = {};
    streamer.forward(x, context).sum().backward();
    CHECK(adapter.parameters().front().grad().defined());
  }
}

TEST_CASE("a wrong input is named") {
  const ToyModel model;
  auto streamer = make(model);
  ToyContext context;
  CHECK_THROWS_WITH(streamer.forward(support::toy_input(at::kBFloat16), context),
                    ContainsSubstring("BFloat16") && ContainsSubstring("F32"));
  CHECK_THROWS_WITH(
      streamer.forward(at::empty({1, 24}, at::TensorOptions{}.device(at::kMeta)), context),
      ContainsSubstring("meta") && ContainsSubstring("cpu"));
  CHECK_THROWS_AS(streamer.forward(at::Tensor{}, context), bs::ContractViolation);
  CHECK_THROWS_WITH(streamer.to(at::Device{"cuda:0"}),
                    ContainsSubstring("cuda:0") && ContainsSubstring("cpu"));
  CHECK_NOTHROW(streamer.to(at::Device{"cpu"}));
}

TEST_CASE("stored tensors that do not fit the blocks are named") {
  const ToyModel model;
  std::vector<ToyBlock> blocks = model.blocks();
  blocks[3].inner = 100;
  CHECK_THROWS_WITH(
      (Host{blocks, model.storage("file"), bs::HostBackend{}, support::toy_options()}),
      ContainsSubstring("block 3") && ContainsSubstring("up.weight") &&
          ContainsSubstring("[129, 24]") && ContainsSubstring("[100, 24]"));
  blocks = model.blocks();
  blocks[2].inner = 5;
  CHECK_THROWS_WITH(
      (Host{blocks, model.storage("file"), bs::HostBackend{}, support::toy_options()}),
      ContainsSubstring("block 2") && ContainsSubstring("missing"));
  blocks = model.blocks();
  blocks[4].inner = 0;
  CHECK_THROWS_WITH(
      (Host{blocks, model.storage("file"), bs::HostBackend{}, support::toy_options()}),
      ContainsSubstring("block 4") && ContainsSubstring("unknown to the block"));
  blocks.pop_back();
  CHECK_THROWS_WITH(
      (Host{blocks, model.storage("file"), bs::HostBackend{}, support::toy_options()}),
      ContainsSubstring("6 stored, 5 listed"));
}

TEST_CASE("evaluation mode is the default and explains itself in a backward") {
  const ToyModel model;
  auto streamer = make(model);
  const auto adapter = model.adapter();
  ToyContext context;
  CHECK_FALSE(streamer.is_training());
  CHECK_FALSE(streamer.forward(support::toy_input(), context).requires_grad());  // nothing trains
  streamer.attach(adapter.table(model.lora_blocks()));
  auto output = streamer.forward(support::toy_input(), context);
  CHECK_THROWS_WITH(output.sum().backward(),
                    ContainsSubstring("evaluation mode") && ContainsSubstring("train()"));
  streamer.train();
  {
    const c10::InferenceMode inference;
    CHECK_FALSE(streamer.forward(support::toy_input(), context).requires_grad());
  }
  streamer.forward(support::toy_input(), context)
      .sum()
      .backward();  // views made in InferenceMode serve training
  CHECK(adapter.parameters().front().grad().defined());
}

TEST_CASE(
    "traffic of a step: the last blocks of the forward are not fetched again, backward stops where "
    "nothing trains") {
  const ToyModel model{bs::DType::f32, {8, 8, 8, 8, 8, 8}};
  for (const std::uint32_t ahead : {0U, 1U, 2U}) {
    for (const double top : {1.0, 0.5}) {
      auto options = support::toy_options(ahead);
      options.prefetch_next_pass = false;
      Host streamer{model.blocks(), model.storage("file"), bs::HostBackend{}, options};
      const auto adapter = model.adapter(top);
      streamer.attach(adapter.table(model.lora_blocks()));
      ToyContext context;
      streamer.train().forward(support::toy_input(), context).sum().backward();
      const auto statistics = streamer.statistics();
      CHECK(statistics.fetches == 6 + (top == 1.0 ? 6 : 3) - (ahead + 1));
      CHECK(statistics.visits == 6 + (top == 1.0 ? 6 : 3));
      CHECK(statistics.bytes_read == statistics.bytes_needed);
      for (const at::Tensor& p : adapter.parameters()) CHECK(p.grad().defined());
    }
  }
}

TEST_CASE("b88 frozen blocks below do not cut the graph, and nothing else receives a gradient") {
  const ToyModel model;
  auto streamer = make(model);
  const auto adapter = model.adapter(0.5);
  streamer.attach(adapter.table(model.lora_blocks()));
  CHECK(streamer.parameters().size() == adapter.parameters().size());
  ToyContext context;
  const auto x = support::toy_input();  // needs no gradient
  streamer.train().forward(x, context).sum().backward();
  CHECK_FALSE(x.grad().defined());
  for (const at::Tensor& p : adapter.parameters()) CHECK(p.grad().abs().sum().item<float>() > 0);
}

TEST_CASE(
    "several forwards before a backward accumulate; a forward without backward changes nothing") {
  const ToyModel model;
  const auto adapter = model.adapter();
  const auto gradient_of = [&](auto&& body) {
    for (const at::Tensor& p : adapter.parameters()) p.mutable_grad() = at::Tensor{};
    auto streamer = make(model);
    streamer.attach(adapter.table(model.lora_blocks()));
    streamer.train();
    body(streamer);
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : adapter.parameters()) gradients.push_back(p.grad().clone());
    return gradients;
  };
  ToyContext context;
  const auto a = support::toy_input(), b = support::toy_input() * 0.5;
  const auto apart = gradient_of([&](Host& s) {
    s.forward(b, context).sum().backward();
    s.forward(a, context).sum().backward();
  });
  const auto together = gradient_of([&](Host& s) {
    auto first = s.forward(a, context), second = s.forward(b, context);
    (void)s.forward(a, context);  // dropped
    second.sum().backward();
    first.sum().backward();
  });
  for (std::size_t i = 0; i < apart.size(); ++i) CHECK(same_bits(apart[i], together[i]));
}

TEST_CASE("a graph outlives a streamer that was moved or destroyed") {
  const ToyModel model;
  const auto adapter = model.adapter();
  ToyContext context;
  at::Tensor output;
  {
    auto streamer = std::make_unique<Host>(make(model));
    streamer->attach(adapter.table(model.lora_blocks()));
    streamer->train();
    auto moved = std::make_unique<Host>(std::move(*streamer));
    streamer.reset();
    output = moved->forward(support::toy_input(), context);
  }
  output.sum().backward();
  CHECK(adapter.parameters().front().grad().defined());
}

TEST_CASE("what changed between forward and backward is noticed") {
  const ToyModel model;
  const auto adapter = model.adapter();
  auto streamer = make(model);
  streamer.attach(adapter.table(model.lora_blocks()));
  streamer.train();
  ToyContext context;
  const auto forward = [&] { return streamer.forward(support::toy_input(), context); };
  SECTION("a parameter") {
    auto output = forward();
    {
      const c10::NoGradGuard no_grad;
      adapter.parameters()[3].add_(1);
    }
    CHECK_THROWS_WITH(output.sum().backward(),
                      ContainsSubstring("changed in place") && ContainsSubstring("optimizer"));
  }
  SECTION("the input") {
    auto x = support::toy_input();
    auto output = streamer.forward(x, context);
    x.add_(1);
    CHECK_THROWS_WITH(output.sum().backward(),
                      ContainsSubstring("input of block 0") && ContainsSubstring("in place"));
  }
  SECTION("the adapters or the dtype") {
    auto output = forward();
    streamer.attach(adapter.table(model.lora_blocks()));
    CHECK_THROWS_WITH(output.sum().backward(), ContainsSubstring("adapters changed"));
  }
  SECTION("a second backward needs retain_graph") {
    auto output = forward().sum();
    output.backward({}, /*retain_graph=*/true);
    output.backward();
    CHECK_THROWS(output.backward());
  }
  SECTION("a second derivative is refused by name") {
    auto x = support::toy_input().set_requires_grad(true);
    auto output = streamer.forward(x, context).sum();
    CHECK_THROWS_WITH(torch::autograd::grad({output}, {x}, {}, true, /*create_graph=*/true),
                      ContainsSubstring("second derivative"));
  }
  // and afterwards all is well
  forward().sum().backward();
}

TEST_CASE("close gives memory back; the next forward takes it again") {
  const ToyModel model;
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    auto streamer = make(model, 1, mode);
    ToyContext context;
    const auto x = support::toy_input();
    const auto expected = streamer.forward(x, context);
    for (int i = 0; i < 3; ++i) {
      streamer.drain();
      streamer.close();
      CHECK(streamer.statistics().resident_blocks == 0);
      CHECK(same_bits(streamer.forward(x, context), expected));
    }
  }
}

TEST_CASE(
    "b65 a file that shrinks while streaming is an error with its name, and the streamer recovers "
    "when it is back") {
  const ToyModel model;
  for (const std::string tier : {"file", "mapped"}) {
    Host streamer{model.blocks(), model.storage(tier), bs::HostBackend{}, support::toy_options()};
    ToyContext context;
    const auto x = support::toy_input();
    const auto expected = streamer.forward(x, context);
    streamer.close();
    const auto file = model.folder() / "model.safetensors";
    const std::string whole = support::read_text(file);
    std::filesystem::resize_file(file, 3000);
    CHECK_THROWS_WITH(streamer.forward(x, context), ContainsSubstring("model.safetensors"));
    support::write_text(file, whole);
    CHECK(same_bits(streamer.forward(x, context), expected));
  }
}
