// SPDX-License-Identifier: Apache-2.0
// Tensors that all blocks share through their context, and their gradients.
#include "mlps.hpp"

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::modes;
using support::same_bits;
using support::train_options;

namespace {

// [context]
/// What a list is conditioned on, beside what flows through it.
struct Conditions {
  at::Tensor shift, scale;  // (C) each; scale may be undefined
  bool on = true;

  /// Those that need a gradient get one: the sum over the blocks.
  std::vector<at::Tensor*> tensors() { return {&shift, &scale}; }
};
// [/context]
static_assert(bs::context_with_tensors<Conditions>);

struct ConditionedLayerImpl : torch::nn::Module {
  ConditionedLayerImpl() { register_module("linear", linear); }
  at::Tensor forward(const at::Tensor& x, Conditions& conditions) {
    at::Tensor y = linear->forward(x);
    if (conditions.on) y = at::tanh(y + conditions.shift);
    return conditions.scale.defined() ? y * conditions.scale : y;
  }
  torch::nn::Linear linear{support::width, support::width};
};
TORCH_MODULE(ConditionedLayer);

std::vector<ConditionedLayer> make_layers(std::size_t count = 5) {
  std::vector<ConditionedLayer> modules;
  for (std::size_t i = 0; i < count; ++i) {
    modules.emplace_back();
    support::fill(*modules.back(), i);
  }
  return modules;
}
std::vector<at::Tensor> parameters_of(const std::vector<ConditionedLayer>& modules) {
  std::vector<at::Tensor> all;
  for (const auto& module : modules) {
    for (const auto& parameter : module->parameters()) all.push_back(parameter);
  }
  return all;
}
using ConditionedBlock = bs::ModuleBlock<ConditionedLayer, Conditions>;
at::Tensor resident(std::vector<ConditionedLayer>& modules, at::Tensor x, Conditions conditions) {
  for (auto& module : modules) x = module->forward(x, conditions);
  return x;
}
auto stream(const std::vector<ConditionedLayer>& modules, bs::HostMode mode,
            std::uint32_t ahead = 1) {
  std::vector<ConditionedBlock> blocks;
  for (const ConditionedLayer& module : modules) blocks.emplace_back(module);
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                        train_options(ahead)};
  streamer.train();
  return streamer;
}
at::Tensor row(std::uint64_t seed) {
  return at::randn({support::width}, at::detail::createCPUGenerator(seed)).set_requires_grad(true);
}

}  // namespace

TEST_CASE("tensors of the context have the gradients of the resident run, bit for bit") {
  for (const bool frozen : {false, true}) {
    auto reference = make_layers();
    if (frozen) {
      for (const auto& parameter : parameters_of(reference)) parameter.set_requires_grad(false);
    }
    const at::Tensor shift = row(1), scale = row(2);
    const at::Tensor expected = resident(reference, batch(), {shift.sin(), scale});
    expected.square().sum().backward();
    for (const auto mode : modes) {
      for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
        INFO("frozen " << frozen << " ahead " << ahead);
        auto modules = make_layers();
        if (frozen) {
          for (const auto& parameter : parameters_of(modules)) parameter.set_requires_grad(false);
        }
        auto streamer = stream(modules, mode, ahead);
        const at::Tensor own_shift = row(1), own_scale = row(2);
        const at::Tensor output = streamer.forward(batch(), {own_shift.sin(), own_scale});
        CHECK(same_bits(output, expected));
        output.square().sum().backward();
        CHECK(same_bits(own_shift.grad(), shift.grad()));
        CHECK(same_bits(own_scale.grad(), scale.grad()));
        CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
      }
    }
  }
}

TEST_CASE("a context's tensor that is undefined, unused, without gradient, or used elsewhere too") {
  auto modules = make_layers(3), reference = make_layers(3);
  for (const auto mode : modes) {
    auto streamer = stream(modules, mode);
    const at::Tensor shift = row(1), own = row(1);
    resident(reference, batch(), {shift, {}}).sum().backward();
    streamer.forward(batch(), {own, {}}).sum().backward();
    CHECK(same_bits(own.grad(), shift.grad()));

    const at::Tensor unused = row(3);
    streamer.forward(batch(), {unused, {}, false}).sum().backward();
    CHECK_FALSE(unused.grad().defined());

    const at::Tensor constant = row(1).detach(), with_it = row(2), expected = row(2);
    resident(reference, batch(), {constant, expected}).sum().backward();
    streamer.forward(batch(), {constant, with_it}).sum().backward();
    CHECK_FALSE(constant.grad().defined());
    CHECK(same_bits(with_it.grad(), expected.grad()));

    // the input itself, and a use outside
    const at::Tensor all = row(4), of_all = row(4);
    const at::Tensor x = all.unsqueeze(0), own_x = of_all.unsqueeze(0);
    (resident(reference, x, {all, {}}) * all).sum().backward();
    (streamer.forward(own_x, {of_all, {}}) * of_all).sum().backward();
    CHECK(at::allclose(of_all.grad(), all.grad()));
    const auto asked = torch::autograd::grad({streamer.forward(batch(), {own, {}}).sum()}, {own});
    CHECK(same_bits(asked[0], shift.grad()));
  }
}

TEST_CASE("micro-batches have a context each, and contexts may share a tensor") {
  auto modules = make_layers(), reference = make_layers();
  for (const auto mode : modes) {
    auto streamer = stream(modules, mode);
    const at::Tensor one = row(1), shared = row(2), own_one = row(1), own_shared = row(2);
    std::vector<Conditions> contexts{{own_one, own_shared}, {own_shared, {}}};
    const std::vector<at::Tensor> inputs{batch(1), batch(2)};
    const auto outputs = streamer.forward(inputs, contexts);
    (outputs[0].sum() + outputs[1].square().sum()).backward();
    resident(reference, inputs[0], {one, shared}).sum().backward();
    CHECK(same_bits(own_one.grad(), one.grad()));
    resident(reference, inputs[1], {shared, {}}).square().sum().backward();
    CHECK(at::allclose(own_shared.grad(), shared.grad()));
    CHECK(contexts[0].shift.is_same(own_one));  // the caller's contexts are as they were
  }
}

TEST_CASE("a context's tensor changed in place is noticed; one put in its place is not used") {
  auto modules = make_layers(), reference = make_layers();
  auto streamer = stream(modules, bs::HostMode::attached);
  const at::Tensor shift = row(1), expected = row(1);
  Conditions conditions{shift, {}};
  const at::Tensor output = streamer.forward(batch(), conditions);
  {
    const c10::NoGradGuard no_grad;
    shift.add_(1);
  }
  CHECK_THROWS_WITH(output.sum().backward(),
                    ContainsSubstring("tensor 0 of the context") && ContainsSubstring("in place"));
  conditions = {row(1), {}};
  const at::Tensor used = conditions.shift;
  const at::Tensor again = streamer.forward(batch(), conditions).sum();
  conditions = {at::zeros({support::width}), row(9)};
  again.backward({}, /*retain_graph=*/true);
  resident(reference, batch(), {expected, {}}).sum().backward();
  CHECK(same_bits(used.grad(), expected.grad()));
  again.backward();
  CHECK(same_bits(used.grad(), expected.grad() + expected.grad()));
  CHECK_THROWS_WITH(again.backward(), ContainsSubstring("retain_graph"));
}

TEST_CASE("a context whose copies share their tensors is refused") {
  struct Shared {
    std::shared_ptr<at::Tensor> shift;
    std::vector<at::Tensor*> tensors() { return {shift.get()}; }
  };
  const at::Tensor w = at::ones({support::width}).set_requires_grad(true);
  std::vector<bs::FunctionBlock<Shared>> blocks;
  blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", w}},
                      [](const bs::Weights& weights, const at::Tensor& x, Shared& context) {
                        return x * weights[0] + *context.shift;
                      });
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{}};
  Shared context{std::make_shared<at::Tensor>(row(1))};
  CHECK_THROWS_WITH(streamer.train().forward(batch(), context),
                    ContainsSubstring("tensors of its own"));
}
