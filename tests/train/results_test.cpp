// SPDX-License-Identifier: Apache-2.0
// Lists whose last block gives more than what flows.
#include "mlps.hpp"

#include <block_streamer/block/any_block.hpp>

#include <tuple>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::modes;
using support::same_bits;
using support::train_options;

namespace {

/// What flows, the hidden layer, its weights as they are, and where it is positive.
struct TellingImpl : torch::nn::Module {
  TellingImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor h = at::gelu(up->forward(x));
    at::Tensor nothing;
    return {x + down->forward(h), h, tell_weight ? up->weight.detach() : nothing, h > 0};
  }
  torch::nn::Linear up{support::width, 20}, down{20, support::width};
  bool tell_weight = false;
};
TORCH_MODULE(Telling);

std::vector<Telling> make_telling(std::size_t count = 4) {
  std::vector<Telling> modules;
  for (std::size_t i = 0; i < count; ++i) {
    modules.emplace_back();
    support::fill(*modules.back(), i);
  }
  return modules;
}
using TellingBlock = bs::ModuleBlock<Telling>;
static_assert(bs::resulting_block<TellingBlock>);
static_assert(!bs::resulting_block<support::MlpBlock>);
using Result = TellingBlock::Result;

std::vector<at::Tensor> parameters_of(const std::vector<Telling>& modules) {
  std::vector<at::Tensor> all;
  for (const auto& module : modules) {
    for (const auto& parameter : module->parameters()) all.push_back(parameter);
  }
  return all;
}
Result resident(std::vector<Telling>& modules, at::Tensor x) {
  for (std::size_t i = 0; i + 1 < modules.size(); ++i) x = std::get<0>(modules[i]->forward(x));
  return modules.back()->forward(x);
}
auto stream(const std::vector<Telling>& modules, bs::HostMode mode, std::uint32_t ahead = 1) {
  std::vector<TellingBlock> blocks{modules.begin(), modules.end()};
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                        train_options(ahead)};
  streamer.train();
  return streamer;
}

/// Losses through the first, the second, or both.
at::Tensor loss_of(const Result& result, int which) {
  const at::Tensor first = std::get<0>(result).square().sum();
  const at::Tensor second = std::get<1>(result).sin().sum();
  return which == 0 ? first : which == 1 ? second : first + second;
}

}  // namespace

TEST_CASE("the last block's whole tuple is returned, with gradients through each element") {
  for (const int which : {0, 1, 2}) {
    auto reference = make_telling();
    const at::Tensor x = batch().set_requires_grad(true);
    const Result expected = resident(reference, x);
    loss_of(expected, which).backward();
    for (const auto mode : modes) {
      for (const std::uint32_t ahead : {0U, 2U}) {
        INFO("loss " << which << " ahead " << ahead);
        auto modules = make_telling();
        auto streamer = stream(modules, mode, ahead);
        const at::Tensor input = batch().set_requires_grad(true);
        const Result result = streamer.forward(input);
        CHECK(same_bits(std::get<0>(result), std::get<0>(expected)));
        CHECK(same_bits(std::get<1>(result), std::get<1>(expected)));
        CHECK_FALSE(std::get<2>(result).defined());
        CHECK(same_bits(std::get<3>(result), std::get<3>(expected)));
        CHECK(std::get<1>(result).requires_grad());
        CHECK_FALSE(std::get<3>(result).requires_grad());
        loss_of(result, which).backward();
        CHECK(same_bits(input.grad(), x.grad()));
        CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
      }
    }
  }
}

TEST_CASE("whole results of micro-batches, in evaluation, and of what lies in a slot") {
  auto reference = make_telling();
  for (const auto mode : modes) {
    auto modules = make_telling();
    auto streamer = stream(modules, mode);
    const std::vector<at::Tensor> inputs{batch(1), batch(2)};
    const auto results = streamer.forward(inputs);
    REQUIRE(results.size() == 2);
    auto again = make_telling();
    (loss_of(resident(again, inputs[0]), 2)).backward();
    (loss_of(resident(again, inputs[1]), 1)).backward();
    (loss_of(results[0], 2) + loss_of(results[1], 1)).backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(again)));

    modules.back()->tell_weight = true;  // a view of the slot, which must not be left there
    streamer.eval();
    const Result told = [&] {
      const c10::NoGradGuard no_grad;
      return streamer.forward(inputs[0]);
    }();
    const at::Tensor weight = modules.back()->up->weight, then = weight.detach().clone();
    {
      const c10::NoGradGuard no_grad;
      weight.zero_();
      (void)streamer.forward(inputs[1]);  // its slot has other bytes now
    }
    CHECK(same_bits(std::get<2>(told), then));
    CHECK(same_bits(std::get<0>(told), std::get<0>(resident(reference, inputs[0]))));
  }
}

TEST_CASE("an element may be the input, or what another element is, and may be changed in place") {
  struct EchoImpl : torch::nn::Module {
    EchoImpl() { w = register_parameter("w", torch::full({support::width}, 2.0)); }
    std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x) {
      const at::Tensor y = x * w;
      return {y, y, x};
    }
    at::Tensor w;
  };
  const auto module = std::make_shared<EchoImpl>();
  std::vector<bs::ModuleBlock<EchoImpl>> blocks{bs::ModuleBlock<EchoImpl>{module}};
  bs::Streamer streamer{blocks, bs::ram_storage_of(blocks), bs::HostBackend{}};
  const at::Tensor x = at::ones({3, support::width}).set_requires_grad(true);
  const auto [first, second, third] = streamer.train().forward(x);
  (first.sum() + 3 * second.sum() + 5 * third.sum()).backward();
  CHECK(same_bits(x.grad(), at::full({3, support::width}, 2.0 + 3 * 2.0 + 5)));
  CHECK(same_bits(module->w.grad(), at::full({support::width}, 4.0 * 3)));
  const at::Tensor constant = at::ones({3, support::width});
  const auto echo = std::get<2>(streamer.forward(constant));
  CHECK(echo.requires_grad());
  CHECK_FALSE(constant.requires_grad());  // the caller's tensor is not made a result
}

TEST_CASE("a list of unlike blocks, and a tuple of more than tensors, give what flows") {
  struct CountingImpl : torch::nn::Module {
    std::tuple<at::Tensor, int> forward(const at::Tensor& x) { return {x * 2, 1}; }
  };
  static_assert(!bs::resulting_block<bs::ModuleBlock<CountingImpl>>);
  using Any = bs::AnyBlock<at::Tensor, bs::NoContext>;
  auto telling = make_telling(1);
  std::vector<Any> blocks;
  blocks.emplace_back(bs::ModuleBlock<CountingImpl>{std::make_shared<CountingImpl>()});
  blocks.emplace_back(TellingBlock{telling[0]});
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{}};
  const at::Tensor x = batch(), y = streamer.forward(x);
  CHECK(same_bits(y, std::get<0>(telling[0]->forward(x * 2))));
}
