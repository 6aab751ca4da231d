// SPDX-License-Identifier: Apache-2.0
// Micro-batches that pass each block together against the same ones run one after another.
#include "mlps.hpp"

#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/optim/sgd.hpp>

#include <ATen/Context.h>

#include <support/catch.hpp>

#include <optional>

namespace bs = block_streamer;
using support::make_mlps;
using support::parameters_of;
using support::same_bits;

namespace {

/// Of unequal lengths.
std::vector<at::Tensor> inputs_of(std::size_t count, bool needed = true) {
  std::vector<at::Tensor> inputs;
  for (std::size_t i = 0; i < count; ++i) {
    auto generator = at::detail::createCPUGenerator(40 + i);
    inputs.push_back(at::randn({static_cast<std::int64_t>(3 + 2 * i), support::width}, generator));
    inputs.back().set_requires_grad(needed);
  }
  return inputs;
}

/// Whatever is left is held by the streamer.
template <class Backend>
auto stream(const std::vector<support::Mlp>& modules, Backend backend,
            const bs::StreamerOptions& options = support::train_options(1)) {
  auto blocks = support::blocks_of(modules);
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), std::move(backend), options};
  streamer.train();
  return streamer;
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.square().sum();
}

template <class Streamer>
void run_in_turn(Streamer& streamer, const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& input : inputs) loss_of(streamer.forward(input)).backward();
}
template <class Streamer>
void run_together(Streamer& streamer, const std::vector<at::Tensor>& inputs) {
  at::Tensor total;
  for (const at::Tensor& output : streamer.forward(inputs))
    total = total.defined() ? total + loss_of(output) : loss_of(output);
  total.backward();
}

}  // namespace

TEST_CASE(
    "micro-batches together have the bits of one after another: outputs, gradients of parameters "
    "and inputs, mode x depth x cache x number") {
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    for (std::uint32_t ahead = 0; ahead <= 2; ++ahead) {
      for (const std::size_t count : {1U, 2U, 5U}) {
        auto modules = make_mlps(), reference = make_mlps();
        auto ours =
            stream(modules, bs::HostBackend{mode}, support::train_options(ahead, ahead == 2));
        auto theirs = stream(reference, bs::HostBackend{mode});
        const auto together = inputs_of(count), in_turn = inputs_of(count);
        run_in_turn(theirs, in_turn);
        run_together(ours, together);
        INFO("detached " << (mode == bs::HostMode::detached) << " ahead " << ahead << " count "
                         << count);
        CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
        CHECK(support::same_gradients(together, in_turn));
        CHECK(parameters_of(modules)[1].grad().defined());
        CHECK_FALSE(modules[0]->unused.grad().defined());
        const auto outputs = ours.forward(together);
        for (std::size_t i = 0; i < count; ++i)
          CHECK(same_bits(outputs[i].detach(), theirs.forward(in_turn[i]).detach()));
      }
    }
  }
}

TEST_CASE("the page's snippet: the loss of a step does not depend on how its rows are split") {
  auto modules = make_mlps(), reference = make_mlps();
  auto streamer = stream(modules, bs::HostBackend{}), whole = stream(reference, bs::HostBackend{});
  const auto inputs = inputs_of(3, false);
  const double scored = 3 + 5 + 7;
  // [together]
  const std::vector<at::Tensor> outputs =
      streamer.forward(inputs);  // each block fetched once for all
  at::Tensor loss;
  for (const at::Tensor& output : outputs) {
    const at::Tensor own = output.square().sum() / scored;
    loss = loss.defined() ? loss + own : own;
  }
  loss.backward();  // one reverse pass: each block fetched once more
  // [/together]
  (whole.forward(at::cat(inputs)).square().sum() / scored).backward();
  const auto ours = parameters_of(modules), theirs = parameters_of(reference);
  for (std::size_t p = 0; p < ours.size(); ++p) {  // sums in another order
    CHECK(ours[p].grad().defined() == theirs[p].grad().defined());
    if (ours[p].grad().defined()) CHECK(at::allclose(ours[p].grad(), theirs[p].grad(), 1e-4, 1e-6));
  }
}

TEST_CASE("bytes read, needed and copied do not depend on the number of micro-batches") {
  std::optional<bs::Statistics> expected;
  for (const std::size_t count : {1U, 2U, 4U, 8U}) {
    auto modules = make_mlps();
    auto streamer = stream(modules, bs::HostBackend{bs::HostMode::detached});
    for (int step = 0; step < 2; ++step) run_together(streamer, inputs_of(count));
    streamer.drain();
    const bs::Statistics now = streamer.statistics();
    if (!expected) expected = now;
    CHECK(now.bytes_needed == expected->bytes_needed);
    CHECK(now.bytes_read == expected->bytes_read);
    CHECK(now.bytes_copied == expected->bytes_copied);
    CHECK(now.bytes_copied_out == expected->bytes_copied_out);
    CHECK(now.fetches == expected->fetches);
    CHECK(now.visits == 2 * 2 * modules.size());
  }
}

TEST_CASE("a micro-batch without a loss, and inputs of which some need a gradient") {
  for (const bool any_needed : {false, true}) {
    auto modules = make_mlps(), reference = make_mlps();
    modules[0]->up->weight.set_requires_grad(false);
    reference[0]->up->weight.set_requires_grad(false);
    auto ours = stream(modules, bs::HostBackend{}), theirs = stream(reference, bs::HostBackend{});
    auto inputs = inputs_of(4, false), other = inputs_of(4, false);
    if (any_needed) {
      inputs[2].set_requires_grad(true);
      other[2].set_requires_grad(true);
      inputs[1].set_requires_grad(true);  // has no loss
    }
    const auto outputs = ours.forward(inputs);
    (loss_of(outputs[0]) + loss_of(outputs[2]) + loss_of(outputs[3])).backward();
    for (const std::size_t i : {0U, 2U, 3U}) loss_of(theirs.forward(other[i])).backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
    CHECK(same_bits(inputs[2].grad(), other[2].grad()));
    CHECK_FALSE(inputs[1].grad().defined());
    CHECK(inputs[2].grad().defined() == any_needed);
  }
}

TEST_CASE("inputs alone train: those that need no gradient are not computed again") {
  std::size_t runs = 0;
  std::vector<bs::FunctionBlock<>> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.emplace_back([&runs](const at::Tensor& x) {
      ++runs;
      return at::tanh(x);
    });
  }
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{}};
  streamer.train();
  auto inputs = inputs_of(3, false);
  inputs[1].set_requires_grad(true);
  const auto outputs = streamer.forward(inputs);
  runs = 0;
  (outputs[0].sum() + outputs[1].sum() + outputs[2].sum()).backward();
  CHECK(runs == 3);
  const at::Tensor x = inputs[1].detach().requires_grad_();
  at::tanh(at::tanh(at::tanh(x))).sum().backward();
  CHECK(same_bits(inputs[1].grad(), x.grad()));
}

TEST_CASE("random numbers: each micro-batch draws from a state of its own what it draws alone") {
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    auto modules = make_mlps(5, 0.4), reference = make_mlps(5, 0.4);
    auto ours = stream(modules, bs::HostBackend{mode}),
         theirs = stream(reference, bs::HostBackend{});
    const auto inputs = inputs_of(3), other = inputs_of(3);
    std::vector<bs::RngState> states;
    for (std::uint64_t i = 0; i < 3; ++i) states.push_back(bs::RngState::seeded(at::kCPU, 70 + i));
    at::manual_seed(5);
    const auto outputs = ours.forward(inputs, states);
    (loss_of(outputs[0]) + loss_of(outputs[1]) + loss_of(outputs[2])).backward();
    const at::Tensor after = at::rand({4});
    at::manual_seed(5);
    CHECK(same_bits(after, at::rand({4})));  // the caller's stream was left alone
    for (std::uint64_t i = 0; i < 3; ++i) {
      at::manual_seed(70 + i);
      const at::Tensor output = theirs.forward(other[i]);
      CHECK(same_bits(outputs[i].detach(), output.detach()));
      const at::Tensor next = at::rand({4});
      states[i].apply();  // it ended where the run alone did
      CHECK(same_bits(next, at::rand({4})));
      loss_of(output).backward();
    }
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
    CHECK(support::same_gradients(inputs, other));
  }
}

TEST_CASE("without states of their own micro-batches replay what they drew, block by block") {
  auto modules = make_mlps(4, 0.4);
  auto streamer = stream(modules, bs::HostBackend{});
  const auto inputs = inputs_of(2), other = inputs_of(2);
  at::manual_seed(9);
  run_together(streamer, inputs);
  std::vector<at::Tensor> hidden = other;
  auto reference = make_mlps(4, 0.4);  // draws, too
  at::manual_seed(9);
  for (auto& module : reference) {
    module->train();
    for (at::Tensor& x : hidden) x = module->forward(x);
  }
  (loss_of(hidden[0]) + loss_of(hidden[1])).backward();
  CHECK(support::same_gradients(inputs, other));
  for (std::size_t p = 0; p < parameters_of(modules).size(); ++p) {  // another order of the sums
    const auto ours = parameters_of(modules)[p].grad(), theirs = parameters_of(reference)[p].grad();
    CHECK(ours.defined() == theirs.defined());
    if (ours.defined()) CHECK(at::allclose(ours, theirs, 1e-4, 1e-5));
  }
}

TEST_CASE("micro-batches in a step: one update, with the sum of the gradients") {
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    const auto make = [&](const std::vector<support::Mlp>& modules) {
      auto blocks = support::blocks_of(modules);
      auto storage = bs::ram_storage_of(blocks);
      bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                            support::train_options(1), bs::Sgd{{0.9}}};
      streamer.train();
      return streamer;
    };
    auto modules = make_mlps(), reference = make_mlps();
    auto ours = make(modules), theirs = make(reference);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const auto inputs = inputs_of(3, false);
      const auto outputs = ours.forward(inputs);
      ours.begin_step({step, 0.01, 1});
      (loss_of(outputs[0]) + loss_of(outputs[1]) + loss_of(outputs[2])).backward();
      ours.end_step();
      run_in_turn(theirs, inputs);
      theirs.step({step, 0.01, 1});
      CHECK(support::same_values(parameters_of(modules), parameters_of(reference)));
    }
  }
}

TEST_CASE("bf16 over fp32 masters: the sums of micro-batches are taken in the masters' type") {
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    auto options = support::train_options(1);
    options.dtype = bs::DType::bf16;
    auto modules = make_mlps(), reference = make_mlps();
    auto ours = stream(modules, bs::HostBackend{mode}, options);
    auto theirs = stream(reference, bs::HostBackend{mode}, options);
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& input : inputs_of(3, false)) inputs.push_back(input.to(at::kBFloat16));
    run_together(ours, inputs);
    run_in_turn(theirs, inputs);
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("a backward that asks for some outputs, twice, and misuse") {
  auto modules = make_mlps(), reference = make_mlps();
  auto ours = stream(modules, bs::HostBackend{}), theirs = stream(reference, bs::HostBackend{});
  const auto inputs = inputs_of(2), other = inputs_of(2);
  const auto outputs = ours.forward(inputs);
  loss_of(outputs[1]).backward({}, /*retain_graph=*/true);
  loss_of(outputs[0]).backward();
  loss_of(theirs.forward(other[1])).backward();
  loss_of(theirs.forward(other[0])).backward();
  CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  CHECK(support::same_gradients(inputs, other));

  CHECK_THROWS_AS(ours.forward(std::vector<at::Tensor>{}), bs::ContractViolation);
  std::vector<bs::RngState> one{bs::RngState::capture(at::kCPU)};
  CHECK_THROWS_WITH(ours.forward(inputs, one), ContainsSubstring("all micro-batches or for none"));
  auto spoilt = inputs_of(2, false);
  const auto late = ours.forward(spoilt);
  spoilt[1].add_(1);
  CHECK_THROWS_WITH((late[0].sum() + late[1].sum()).backward(), ContainsSubstring("block 0"));
  run_together(ours, inputs_of(2));  // usable
}

TEST_CASE("one input several times, and blocks that return it, are micro-batches like others") {
  std::vector<bs::FunctionBlock<>> blocks;
  const at::Tensor weight = at::full({support::width}, 2.0).set_requires_grad(true);
  blocks.emplace_back([](const at::Tensor& x) { return x; });
  blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", weight}},
                      [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                        return x.size(0) == 3 ? x : x * w[0];
                      });
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{}};
  streamer.train();
  const at::Tensor passed = at::ones({3, support::width}), used = at::ones({2, support::width});
  passed.requires_grad_();
  const auto outputs = streamer.forward(std::vector<at::Tensor>{passed, used, passed});
  CHECK_FALSE(outputs[0].is_same(outputs[2]));
  (outputs[0].sum() + 3 * outputs[1].sum() + 5 * outputs[2].sum()).backward();
  CHECK(same_bits(passed.grad(), at::full({3, support::width}, 6.0)));
  CHECK(same_bits(weight.grad(), at::full({support::width}, 6.0)));
}

TEST_CASE("every access to the gradients of micro-batches is ordered") {
  using Backend = bs::CheckedBackend<bs::HostBackend>;
  Backend backend{bs::HostBackend{bs::HostMode::detached}};
  auto modules = make_mlps();
  {
    auto streamer = stream(modules, backend);
    for (int step = 0; step < 3; ++step) run_together(streamer, inputs_of(3));
  }
  INFO(to_string(backend.log()));
  CHECK(backend.log().empty());
}
