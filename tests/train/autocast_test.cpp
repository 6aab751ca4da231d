// SPDX-License-Identifier: Apache-2.0
// Training under autocast, compared with the same modules resident.
#include "mlps.hpp"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include <thread>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::make_mlps;
using support::Mlp;
using support::modes;
using support::parameters_of;
using support::same_bits;
using support::stream_mlps;
using support::train_options;

namespace {

/// A region in which this thread casts on the CPU.
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype = at::kBFloat16, bool remember = true)
      : enabled_{at::autocast::is_autocast_enabled(at::kCPU)},
        dtype_{at::autocast::get_autocast_dtype(at::kCPU)},
        remembers_{at::autocast::is_autocast_cache_enabled()} {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(remember);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, enabled_);
    at::autocast::set_autocast_dtype(at::kCPU, dtype_);
    at::autocast::set_autocast_cache_enabled(remembers_);
  }

 private:
  bool enabled_;
  at::ScalarType dtype_;
  bool remembers_;
};

struct Step {
  at::Tensor output, of_input;
};

/// A forward in a region of autocast, and its backward outside, inside, or on another thread.
template <class Forward>
Step step(Forward&& forward, at::ScalarType dtype, bool remember, int where) {
  const at::Tensor x = batch().set_requires_grad(true);
  Step made;
  at::Tensor loss;
  {
    const Autocast region{dtype, remember};
    made.output = forward(x);
    loss = made.output.to(at::kFloat).square().mean();
    if (where == 1) loss.backward();
  }
  if (where == 0) loss.backward();
  if (where == 2) std::thread{[&] { loss.backward(); }}.join();
  made.output = made.output.detach();
  made.of_input = x.grad();
  return made;
}

}  // namespace

TEST_CASE("b96 a training forward under autocast has the resident run's bits, gradients included") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool remember : {true, false}) {
      for (const int where : {0, 1, 2}) {
        auto reference = make_mlps(5, 0.3);
        at::manual_seed(3);
        const Step expected =
            step([&](const at::Tensor& x) { return support::resident(reference, x); }, dtype,
                 remember, where);
        for (const auto mode : modes) {
          for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
            INFO(dtype << " remember " << remember << " backward " << where << " ahead " << ahead);
            auto modules = make_mlps(5, 0.3);
            auto streamer = stream_mlps(modules, mode, ahead);
            at::manual_seed(3);
            const Step streamed = step([&](const at::Tensor& x) { return streamer.forward(x); },
                                       dtype, remember, where);
            CHECK(same_bits(streamed.output, expected.output));
            CHECK(same_bits(streamed.of_input, expected.of_input));
            CHECK(modules[0]->up->weight.grad().defined());
            CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
          }
        }
        auto plain = make_mlps(5, 0.3);  // autocast does something
        at::manual_seed(3);
        CHECK(!same_bits(support::resident(plain, batch()), expected.output));
      }
    }
  }
}

TEST_CASE("b96 two steps, and forwards without grad, in one region of autocast see new weights") {
  const auto steps = [](std::vector<Mlp>& modules, auto&& forward, bool outside) {
    const Autocast region;
    std::vector<at::Tensor> seen;
    for (int i = 0; i < 2; ++i) {
      {
        const c10::NoGradGuard no_grad;
        seen.push_back(forward(batch(1)));
      }
      // The reference must not use what LibTorch remembers of a forward without grad (its fault).
      if (outside) at::autocast::clear_cache();
      const at::Tensor output = forward(batch(2));
      seen.push_back(output.detach());
      output.to(at::kFloat).square().sum().backward();
      for (const at::Tensor& parameter : parameters_of(modules)) {
        if (!parameter.grad().defined()) continue;
        parameter.data().sub_(parameter.grad(), 1e-2);
        seen.push_back(parameter.grad().clone());
      }
      if (outside) at::autocast::clear_cache();
    }
    return seen;
  };
  auto reference = make_mlps();
  const auto expected = steps(
      reference, [&](const at::Tensor& x) { return support::resident(reference, x); }, true);
  for (const auto mode : modes) {
    auto modules = make_mlps();
    auto streamer = stream_mlps(modules, mode);
    const auto seen = steps(
        modules, [&](const at::Tensor& x) { return streamer.forward(x); }, false);
    CHECK(seen.size() == 2 * (2 + 15));
    CHECK(support::same_values(seen, expected));
    CHECK(support::same_values(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("b97 blocks that share a weight under autocast have its gradient, summed in its type") {
  const auto weight_of = [] {
    return (at::randn({12, 12}, at::detail::createCPUGenerator(5)) * 0.3).set_requires_grad(true);
  };
  const auto list = [](const at::Tensor& weight) {
    std::vector<bs::FunctionBlock<>> blocks;
    for (int i = 0; i < 4; ++i) {
      blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", weight}},
                          [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                            return x + at::linear(at::tanh(x), w[0]);
                          });
    }
    return blocks;
  };
  const at::Tensor expected = weight_of(), weight = weight_of();
  {
    // Casts that are not remembered: LibTorch sums the gradients of one cast in bfloat16.
    const Autocast region{at::kBFloat16, /*remember=*/false};
    at::Tensor x = batch();
    for (auto& block : list(expected)) {
      bs::NoContext none;
      x = block.forward(bs::Weights{{&expected, 1}}, x, none);
    }
    x.sum().backward();
  }
  for (const auto mode : modes) {
    auto blocks = list(weight);
    auto storage = bs::ram_storage_of(blocks);
    bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode}};
    weight.mutable_grad() = at::Tensor{};
    const Autocast region;
    streamer.train().forward(batch()).sum().backward();
    CHECK(same_bits(weight.grad(), expected.grad()));
  }
}

TEST_CASE("b97 a backward leaves no cast behind, and the thread's own way to cast as it was") {
  auto modules = make_mlps();
  auto streamer = stream_mlps(modules, bs::HostMode::attached);
  at::Tensor loss;
  {
    const Autocast region;
    loss = streamer.forward(batch()).sum();
  }
  const bs::AutocastState before = bs::AutocastState::capture(at::kCPU);
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  at::autocast::set_autocast_cache_enabled(false);
  loss.backward();
  CHECK(at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf);
  CHECK(!at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(!at::autocast::is_autocast_cache_enabled());
  before.apply();
  CHECK(at::autocast::get_autocast_dtype(at::kCPU) == at::kBFloat16);

  // A cast of what the module showed in a visit would be found by its next use.
  const Autocast region;
  const c10::NoGradGuard no_grad;
  (void)streamer.forward(batch());
  const at::Tensor weight = modules[0]->up->weight;
  weight.data().zero_();
  CHECK(at::linear(batch(), weight).abs().sum().item<float>() == 0);
}

TEST_CASE("b97 casts are forgotten: those made in a recompute, and the caller's before a forward") {
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> casts;
  std::vector<bs::FunctionBlock<>> blocks;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 4; ++i) {
    weights.push_back(at::full({support::width, support::width}, 0.1).set_requires_grad(true));
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", weights.back()}},
                        [&](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          const at::Tensor cast =
                              at::autocast::cached_cast(at::kBFloat16, w[0], at::kCPU);
                          casts.emplace_back(cast.getIntrusivePtr());
                          return x + at::linear(x, cast);
                        });
  }
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{}};
  at::Tensor loss;
  {
    const Autocast region;
    loss = streamer.train().forward(batch()).sum();
  }
  loss.backward();
  CHECK(casts.size() == 8);
  for (const auto& cast : casts) CHECK(cast.expired());

  auto modules = make_mlps(), changed = make_mlps();
  auto of_modules = stream_mlps(modules, bs::HostMode::attached);
  const Autocast region;
  (void)at::linear(batch(), modules[0]->up->weight);  // remembered by LibTorch
  modules[0]->up->weight.data().zero_();
  changed[0]->up->weight.data().zero_();
  CHECK(same_bits(of_modules.forward(batch()), support::resident(changed, batch())));
}

TEST_CASE("micro-batches under autocast equal one after another, and inputs may have its type") {
  auto together = make_mlps(), reference = make_mlps();
  auto streamer = stream_mlps(together, bs::HostMode::attached);
  auto alone = stream_mlps(reference, bs::HostMode::attached);
  const std::vector<at::Tensor> inputs{batch(1), batch(2).to(at::kBFloat16), batch(3)};
  {
    const Autocast region;
    const auto outputs = streamer.forward(inputs);
    (outputs[0].sum() + outputs[1].sum() + outputs[2].sum()).backward();
    for (const at::Tensor& x : inputs) alone.forward(x).sum().backward();
  }
  CHECK(together[0]->up->weight.grad().defined());
  CHECK(support::same_gradients(parameters_of(together), parameters_of(reference)));
}
