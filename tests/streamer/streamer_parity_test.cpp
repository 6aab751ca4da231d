// SPDX-License-Identifier: Apache-2.0
#include "toy_model.hpp"

#include <block_streamer/optim/adamw.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::same_bits;

namespace {

constexpr bs::DType types[] = {bs::DType::f32, bs::DType::bf16, bs::DType::f16};

struct Result {
  at::Tensor output;
  at::Tensor input_gradient;
  std::vector<at::Tensor> gradients;
};

/// Forward and backward of a loss through `forward`, with the adapter's and the input's gradients.
template <class Forward>
Result run(const bs::LoraAdapter& adapter, at::ScalarType dtype, Forward&& forward) {
  at::Tensor input = support::toy_input(dtype).set_requires_grad(true);
  for (const at::Tensor& p : adapter.parameters()) p.mutable_grad() = at::Tensor{};
  Result result{forward(input), {}, {}};
  result.output.to(at::kFloat).square().sum().backward();
  result.input_gradient = input.grad();
  for (const at::Tensor& p : adapter.parameters()) result.gradients.push_back(p.grad());
  return result;
}

bool equal(const Result& a, const Result& b) {
  bool same = same_bits(a.output, b.output) && same_bits(a.input_gradient, b.input_gradient);
  for (std::size_t i = 0; i < a.gradients.size(); ++i)
    same = same && a.gradients[i].defined() && same_bits(a.gradients[i], b.gradients[i]);
  return same;
}

}  // namespace

TEST_CASE(
    "streamed equals resident bit for bit: tier x mode x depth x chunk x dtype, forward and "
    "gradients") {
  std::size_t combinations = 0;
  for (const bs::DType dtype : types) {
    const support::ToyModel model{dtype};
    const auto scalar = bs::scalar_type_of(dtype);
    auto blocks = model.blocks();
    const auto adapter = model.adapter();
    const auto table = adapter.table(model.lora_blocks());
    support::ToyContext context;
    const Result resident = run(adapter, scalar, [&](const at::Tensor& x) {
      return bs::resident_forward<support::ToyBlock>(blocks, model.resident(), x, context, &table,
                                                     true);
    });
    for (const std::string tier : {"ram", "mapped", "file"}) {
      for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
        for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
          for (const std::uint64_t chunk : {std::uint64_t{1000}, std::uint64_t{1} << 20}) {
            support::ToyStreamer<bs::HostBackend> streamer{model.blocks(), model.storage(tier),
                                                           bs::HostBackend{mode},
                                                           support::toy_options(ahead, chunk)};
            streamer.attach(adapter.table(model.lora_blocks()));
            streamer.train();
            const Result streamed = run(
                adapter, scalar, [&](const at::Tensor& x) { return streamer.forward(x, context); });
            INFO(tier << " ahead " << ahead << " chunk " << chunk << " dtype "
                      << bs::name_of(dtype));
            CHECK(equal(streamed, resident));
            CHECK(streamer.statistics().peak_resident_blocks <= ahead + 1);
            ++combinations;
          }
        }
      }
    }
  }
  WARN(combinations << " combinations");
}

TEST_CASE("twenty steps of AdamW: every loss and every weight equals the resident run") {
  const support::ToyModel model;
  const auto target = at::randn({5, support::toy_width}, at::detail::createCPUGenerator(5));
  const auto losses = [&](auto&& forward, const bs::LoraAdapter& adapter) {
    std::vector<float> all;
    bs::AdamW optimizer;
    std::uint64_t number = 0;
    for (int step = 0; step < 20; ++step) {
      for (const at::Tensor& p : adapter.parameters()) p.mutable_grad() = at::Tensor{};
      at::Tensor loss = (forward(support::toy_input()) - target).square().mean();
      loss.backward();
      std::vector<at::Tensor> parameters = adapter.parameters(), gradients;
      for (const at::Tensor& p : parameters) gradients.push_back(p.grad());
      optimizer.begin_step({.step = ++number, .learning_rate = 0.01});
      optimizer.update(bs::block_at(0), parameters, gradients);
      optimizer.end_step();
      all.push_back(loss.item<float>());
    }
    return all;
  };
  support::ToyContext context;
  context.dropout = 0.25;
  at::manual_seed(77);
  const auto resident_adapter = model.adapter(1, 0.1);
  const auto table = resident_adapter.table(model.lora_blocks());
  auto blocks = model.blocks();
  const auto expected = losses(
      [&](const at::Tensor& x) {
        return bs::resident_forward<support::ToyBlock>(blocks, model.resident(), x, context, &table,
                                                       true);
      },
      resident_adapter);
  REQUIRE(expected.back() < expected.front());
  for (const std::string tier : {"ram", "mapped", "file"}) {
    for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
      at::manual_seed(77);
      const auto adapter = model.adapter(1, 0.1);
      support::ToyStreamer<bs::HostBackend> streamer{model.blocks(), model.storage(tier),
                                                     bs::HostBackend{mode}, support::toy_options()};
      streamer.attach(adapter.table(model.lora_blocks()));
      streamer.train();
      CHECK(losses([&](const at::Tensor& x) { return streamer.forward(x, context); }, adapter) ==
            expected);
      for (std::size_t i = 0; i < adapter.parameters().size(); ++i) {
        CHECK(same_bits(adapter.parameters()[i], resident_adapter.parameters()[i]));
      }
    }
  }
}

TEST_CASE("a converted streamer computes what a converted resident list computes") {
  const support::ToyModel model{bs::DType::bf16};
  auto blocks = model.blocks();
  support::ToyContext context;
  const auto x = support::toy_input();
  const auto resident =
      bs::resident_forward<support::ToyBlock>(blocks, model.resident(bs::DType::f32), x, context);
  for (const std::string tier : {"ram", "file"}) {
    for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
      auto options = support::toy_options();
      options.dtype = bs::DType::f32;
      support::ToyStreamer<bs::HostBackend> streamer{model.blocks(), model.storage(tier),
                                                     bs::HostBackend{mode}, options};
      CHECK(same_bits(streamer.forward(x, context), resident));
      CHECK(streamer.statistics().bytes_converted > 0);
      streamer.to(bs::DType::bf16);
      const auto half = bs::resident_forward<support::ToyBlock>(blocks, model.resident(),
                                                                x.to(at::kBFloat16), context);
      CHECK(same_bits(streamer.forward(x.to(at::kBFloat16), context), half));
      CHECK(streamer.statistics().bytes_converted == 0);
    }
  }
}

TEST_CASE("b99 dropout is replayed, and the caller's random numbers go on as in the resident run") {
  const support::ToyModel model;
  support::ToyContext context;
  context.dropout = 0.5;
  const auto adapter = model.adapter(1, 0.3);
  const auto table = adapter.table(model.lora_blocks());
  auto blocks = model.blocks();
  at::manual_seed(123);
  const Result resident = run(adapter, at::kFloat, [&](const at::Tensor& x) {
    return bs::resident_forward<support::ToyBlock>(blocks, model.resident(), x, context, &table,
                                                   true);
  });
  const auto next = at::randn({4});
  support::ToyStreamer<bs::HostBackend> streamer{model.blocks(), model.storage("file"),
                                                 bs::HostBackend{}, support::toy_options()};
  streamer.attach(adapter.table(model.lora_blocks()));
  streamer.train();
  at::manual_seed(123);
  const Result streamed =
      run(adapter, at::kFloat, [&](const at::Tensor& x) { return streamer.forward(x, context); });
  CHECK(equal(streamed, resident));
  CHECK(same_bits(at::randn({4}), next));
}

TEST_CASE("on a checked device every access of a training step is ordered") {
  using Backend = bs::CheckedBackend<bs::HostBackend>;
  const support::ToyModel model;
  support::ToyContext context;
  for (const std::string tier : {"ram", "file"}) {
    for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
      Backend backend{bs::HostBackend{mode}};
      const bs::ViolationLog log = backend.log();
      {
        const auto adapter = model.adapter();
        support::ToyStreamer<Backend> streamer{model.blocks(), model.storage(tier), backend,
                                               support::toy_options()};
        streamer.attach(adapter.table(model.lora_blocks()));
        streamer.train();
        for (int i = 0; i < 3; ++i)
          run(adapter, at::kFloat,
              [&](const at::Tensor& x) { return streamer.forward(x, context); });
      }
      INFO(to_string(log));
      CHECK(log.empty());
    }
  }
}
