// SPDX-License-Identifier: Apache-2.0
#include "mlps.hpp"

#include <block_streamer/block/any_block.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/optim/gradient_norm.hpp>
#include <block_streamer/optim/sgd.hpp>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::make_mlps;
using support::modes;
using support::parameters_of;
using support::train_options;

namespace {

at::Tensor loss_of(const at::Tensor& output, std::uint64_t step) {
  return (output - batch(100 + step)).square().mean();
}

template <class Optimizer>
auto stream_with(const std::vector<support::Mlp>& modules, bs::HostMode mode, Optimizer optimizer,
                 bool cached = false) {
  auto blocks = support::blocks_of(modules);
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                        train_options(1, cached), std::move(optimizer)};
  streamer.train();
  return streamer;
}

/// 20 steps in the backward, or in a sweep after it.
template <class Streamer>
void train(Streamer& streamer, double rate, bool sweep) {
  for (std::uint64_t step = 0; step < 20; ++step) {
    const bs::StepContext context{step + 1, rate, 1};
    if (!sweep) streamer.begin_step(context);
    loss_of(streamer.forward(batch(step)), step).backward();
    sweep ? streamer.step(context) : streamer.end_step();
    for (const auto& parameter : streamer.parameters()) CHECK_FALSE(parameter.grad().defined());
  }
}
template <class Optimizer>
void train_resident(std::vector<support::Mlp>& modules, Optimizer&& optimizer) {
  for (std::uint64_t step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    loss_of(support::resident(modules, batch(step)), step).backward();
    optimizer.step();
  }
}

/// Notes what happens when, into the list of the test.
struct Recording {
  std::vector<std::string>* events = nullptr;
  [[nodiscard]] static constexpr bs::GradientDelivery delivery() noexcept {
    return bs::GradientDelivery::in_backward;
  }
  void begin_step(const bs::StepContext&) {}
  void prefetch(bs::BlockId) noexcept {}
  void update(bs::BlockId block, std::span<at::Tensor>, std::span<at::Tensor> gradients) {
    std::string text = "update " + std::to_string(bs::index_of(block));
    for (const at::Tensor& gradient : gradients) text += gradient.defined() ? " +" : " -";
    events->push_back(text);
  }
  void end_step() {}
};

at::Tensor square(std::uint64_t seed) {
  return (at::randn({12, 12}, at::detail::createCPUGenerator(seed)) * 0.3).set_requires_grad(true);
}
/// Does in update() what the test says; may run anywhere.
struct Anywhere {
  std::function<void(std::size_t block)> on_update;
  static constexpr bool any_thread = true;
  [[nodiscard]] static constexpr bs::GradientDelivery delivery() noexcept {
    return bs::GradientDelivery::in_backward;
  }
  void begin_step(const bs::StepContext&) {}
  void prefetch(bs::BlockId) noexcept {}
  void update(bs::BlockId block, std::span<at::Tensor>, std::span<at::Tensor>) {
    on_update(bs::index_of(block));
  }
  void end_step() {}
};
static_assert(bs::updates_on_any_thread<Anywhere> && bs::updates_on_any_thread<bs::AdamW>);
/// The same, but on the visitor's thread, as is the rule.
struct Here : Anywhere {
  static constexpr bool any_thread = false;
};
static_assert(!bs::updates_on_any_thread<Here> && !bs::updates_on_any_thread<Recording>);

template <class Policy>
auto stream_with(bs::HostMode mode, std::function<void(std::size_t)> on_update,
                 std::function<void(std::size_t)> on_recompute) {
  std::vector<bs::FunctionBlock<>> blocks;
  for (std::size_t i = 0; i < 4; ++i) {
    const at::Tensor weight = square(i);
    blocks.push_back(
        {{{"w", weight}}, [=](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
           if (c10::GradMode::is_enabled()) on_recompute(i);
           return at::tanh(at::linear(x, w[0]));
         }});
  }
  auto storage = bs::ram_storage_of(blocks);
  Policy policy;
  policy.on_update = std::move(on_update);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                        train_options(1), std::move(policy)};
  streamer.train();
  return streamer;
}
template <class Streamer>
void step_once(Streamer& streamer) {
  auto output = streamer.forward(batch()).sum();
  streamer.begin_step({});
  output.backward();
  streamer.end_step();
}

bs::FunctionBlock<> noted(int index, const at::Tensor& weight, std::vector<std::string>* events) {
  return {{{"w", weight}}, [=](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
            if (c10::GradMode::is_enabled()) events->push_back("run " + std::to_string(index));
            return at::tanh(at::linear(x, w[0]));
          }};
}

}  // namespace

TEST_CASE("SGD and AdamW in the backward, and in a sweep, equal torch::optim over 20 steps") {
  auto sgd_reference = make_mlps(), adamw_reference = make_mlps();
  train_resident(sgd_reference,
                 torch::optim::SGD{parameters_of(sgd_reference),
                                   torch::optim::SGDOptions(5e-2).momentum(0.9).weight_decay(0.1)});
  train_resident(adamw_reference,
                 torch::optim::AdamW{parameters_of(adamw_reference),
                                     torch::optim::AdamWOptions(3e-2).weight_decay(0.1)});
  bs::AdamWOptions adamw;
  adamw.weight_decay = 0.1;
  std::optional<std::vector<at::Tensor>> first;
  for (const auto mode : modes) {
    for (const bool sweep : {false, true}) {
      auto modules = make_mlps();
      auto sgd = stream_with(modules, mode, bs::Sgd{{0.9, 0, 0.1}}, /*cached=*/true);
      train(sgd, 5e-2, sweep);
      CHECK(support::same_values(parameters_of(modules), parameters_of(sgd_reference)));
      auto others = make_mlps();
      auto streamer = stream_with(others, mode, bs::AdamW{adamw}, /*cached=*/true);
      train(streamer, 3e-2, sweep);
      const auto values = parameters_of(others), expected = parameters_of(adamw_reference);
      // torch::optim's C++ AdamW has its moments by other operations, so other roundings
      for (std::size_t i = 0; i < values.size(); ++i)
        CHECK(values[i].allclose(expected[i], 1e-4, 1e-5));
      if (!first) first = values;
      CHECK(support::same_values(values, *first));  // each way the same bits
    }
  }
}

TEST_CASE(
    "a block is stepped while lower ones are still to be computed; a shared master after its last "
    "use, once") {
  for (const auto mode : modes) {
    std::vector<std::string> events;
    const auto a = square(1), shared = square(2), b = square(3);
    std::vector<bs::FunctionBlock<>> blocks;
    blocks.push_back(noted(0, a, &events));
    blocks.push_back(noted(1, shared, &events));
    blocks.push_back(noted(2, b, &events));
    blocks.push_back(noted(3, shared, &events));
    auto storage = bs::ram_storage_of(blocks);
    bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                          train_options(1), Recording{&events}};
    streamer.train();
    auto output = streamer.forward(batch()).sum();
    streamer.begin_step({});
    output.backward();
    streamer.end_step();
    const std::vector<std::string> attached{"run 3",      "run 2", "update 2 +", "run 1",
                                            "update 1 +", "run 0", "update 0 +"};
    // a copy is waited for when the next block's work has been issued
    const std::vector<std::string> detached{"run 3", "run 2",      "run 1",     "update 2 +",
                                            "run 0", "update 1 +", "update 0 +"};
    CHECK(events == (mode == bs::HostMode::attached ? attached : detached));
  }
}

TEST_CASE("an update that may run on any thread lasts while the next block is visited") {
  std::promise<void> lowest_runs;
  const auto runs = lowest_runs.get_future().share();
  std::atomic<bool> overlapped = false;
  std::atomic<int> at_once = 0, most = 0;
  std::vector<std::size_t> order;  // one update at a time: no lock
  auto streamer = stream_with<Anywhere>(
      bs::HostMode::detached,
      [&](std::size_t block) {
        most = std::max(most.load(), ++at_once);
        if (block == 2)
          overlapped = runs.wait_for(std::chrono::seconds{30}) == std::future_status::ready;
        order.push_back(block);
        --at_once;
      },
      [&](std::size_t block) {
        if (block == 0) lowest_runs.set_value();
      });
  step_once(streamer);
  CHECK(overlapped);
  CHECK(most == 1);
  CHECK(order == std::vector<std::size_t>{3, 2, 1, 0});  // all of them, before the step ended
}

TEST_CASE("updates run on the visitor's thread unless the policy and the device allow another") {
  const auto threads_of = [](auto& streamer, std::vector<std::thread::id>& seen) {
    step_once(streamer);
    REQUIRE(seen.size() == 4);
    const auto here = std::this_thread::get_id();
    return std::count(seen.begin(), seen.end(), here);
  };
  std::vector<std::thread::id> seen;
  const auto note = [&seen](std::size_t) { seen.push_back(std::this_thread::get_id()); };
  const auto nothing = [](std::size_t) {};
  auto here = stream_with<Here>(bs::HostMode::detached, note, nothing);
  CHECK(threads_of(here, seen) == 4);
  seen.clear();
  auto attached = stream_with<Anywhere>(bs::HostMode::attached, note, nothing);
  CHECK(threads_of(attached, seen) == 4);
  seen.clear();
  auto elsewhere = stream_with<Anywhere>(bs::HostMode::detached, note, nothing);
  CHECK(threads_of(elsewhere, seen) == 0);
}

TEST_CASE("what an update on another thread throws, the backward throws") {
  for (const std::size_t bad : {3U, 0U}) {
    std::vector<std::size_t> updated;
    bool fails = true;
    auto streamer = stream_with<Anywhere>(
        bs::HostMode::detached,
        [&](std::size_t block) {
          if (fails && block == bad) throw std::runtime_error{"worn out"};
          updated.push_back(block);
        },
        [](std::size_t) {});
    auto output = streamer.forward(batch()).sum();
    streamer.begin_step({});
    CHECK_THROWS_WITH(output.backward(), ContainsSubstring("worn out"));
    streamer.end_step();
    CHECK(updated.size() == 3 - bad);
    fails = false;
    updated.clear();
    step_once(streamer);
    CHECK(updated.size() == 4);
  }
}

TEST_CASE("b107 each parameter counts its own steps, whatever others miss") {
  for (const auto mode : modes) {
    auto modules = make_mlps(3);
    auto streamer = stream_with(modules, mode, bs::AdamW{});
    for (std::uint64_t step = 1; step <= 5; ++step) {
      modules[1]->up->weight.set_requires_grad(step % 2 == 1);
      streamer.begin_step({step, 1e-2, 1});
      loss_of(streamer.forward(batch(step)), step).backward();
      streamer.end_step();
    }
    // in the order in which the module names its parameters
    std::vector<std::uint64_t> steps;
    for (const auto& moments : streamer.optimizer().moments(bs::BlockId{1}))
      steps.push_back(moments.step);
    std::vector<std::uint64_t> expected;
    for (const auto& [name, tensor] : support::MlpBlock{modules[1]}.masters()) {
      if (!tensor.is_floating_point()) continue;
      const bool trains = name != "unused" && name != "scale";
      expected.push_back(!trains ? 0 : name == "up.weight" ? 3 : 5);
    }
    CHECK(steps == expected);
  }
}

TEST_CASE("b106 accumulation and clipping take all gradients first, then step") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    auto streamer = stream_with(modules, mode, bs::Sgd{{0.9}});
    torch::optim::SGD sgd{parameters_of(reference), torch::optim::SGDOptions(0.1).momentum(0.9)};
    for (std::uint64_t step = 1; step <= 3; ++step) {
      sgd.zero_grad();
      for (std::uint64_t micro = 0; micro < 4; ++micro) {
        (loss_of(streamer.forward(batch(micro)), micro) * 8).backward();
        (loss_of(support::resident(reference, batch(micro)), micro) * 8).backward();
      }
      if (step == 1)
        CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
      torch::nn::utils::clip_grad_norm_(parameters_of(reference), 1.0);
      sgd.step();
      std::vector<at::Tensor> gradients;
      for (const auto& parameter : streamer.parameters()) gradients.push_back(parameter.grad());
      const double norm = bs::global_gradient_norm(gradients);
      CHECK(norm > 1);
      streamer.step({step, 0.1, bs::clip_factor(norm, 1.0)});
    }
    const auto values = parameters_of(modules), expected = parameters_of(reference);
    for (std::size_t i = 0; i < values.size(); ++i)
      CHECK(values[i].allclose(expected[i], 1e-5, 1e-6));  // the norm is summed in another order
  }
}

TEST_CASE("misuse of steps is refused, and a backward that fails in one leaves all usable") {
  for (const auto mode : modes) {
    auto modules = make_mlps();
    auto external = stream_with(modules, mode, bs::ExternalOptimizer{});
    CHECK_THROWS_WITH(external.begin_step({}), ContainsSubstring("parameters()"));
    CHECK_THROWS_WITH(external.step({}), ContainsSubstring("parameters()"));

    std::vector<std::string> events;
    bool fails = false;
    std::vector<bs::FunctionBlock<>> blocks;
    for (int i = 0; i < 4; ++i) {
      auto inner = noted(i, square(static_cast<std::uint64_t>(i)), &events);
      blocks.emplace_back(inner.masters(),
                          [inner, i, &fails](const bs::Weights& w, const at::Tensor& x,
                                             bs::NoContext& none) mutable {
                            if (fails && i == 1 && c10::GradMode::is_enabled())
                              throw std::runtime_error{"tired"};
                            return inner.forward(w, x, none);
                          });
    }
    auto storage = bs::ram_storage_of(blocks);
    bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                          train_options(1), bs::Sgd{}};
    streamer.train();
    const auto parameters = streamer.parameters();
    std::vector<at::Tensor> before;
    for (const auto& parameter : parameters) before.push_back(parameter.detach().clone());
    auto output = streamer.forward(batch()).sum();
    fails = true;
    streamer.begin_step({1, 0.1, 1});
    CHECK_THROWS_WITH(streamer.begin_step({}), ContainsSubstring("end_step"));
    CHECK_THROWS_WITH(output.backward(), ContainsSubstring("tired"));
    streamer.end_step();
    CHECK_FALSE(support::same_bits(parameters[3], before[3]));  // above the failure: stepped
    CHECK(support::same_bits(parameters[1], before[1]));
    CHECK(support::same_bits(parameters[0], before[0]));
    fails = false;
    auto first = streamer.forward(batch()).sum(), second = streamer.forward(batch()).sum();
    streamer.begin_step({1, 0.1, 1});
    first.backward();
    CHECK_THROWS_WITH(second.backward(), ContainsSubstring("changed in place"));
    streamer.end_step();
    streamer.begin_step({1, 0, 1});
    (streamer.forward(batch()).sum()).backward();
    CHECK_THROWS_WITH(streamer.forward(batch()).sum().backward(),
                      ContainsSubstring("one backward"));
    streamer.end_step();
    parameters[2].register_hook([](const at::Tensor& g) { return g; });
    streamer.begin_step({1, 0, 1});
    CHECK_THROWS_WITH(streamer.forward(batch()).sum().backward(), ContainsSubstring("hooks"));
    streamer.end_step();
    streamer.forward(batch()).sum().backward();
    CHECK(parameters[2].grad().defined());
  }
}
