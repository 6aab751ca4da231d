// SPDX-License-Identifier: Apache-2.0
#include "mlps.hpp"

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::make_mlps;
using support::parameters_of;
using support::same_bits;
using support::train_options;

namespace {

/// 20 steps through `forward`; the losses.
template <class Optimizer, class Forward>
std::vector<at::Tensor> train(Optimizer&& optimizer, Forward&& forward) {
  std::vector<at::Tensor> losses;
  for (std::uint64_t step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = (forward(batch(step)) - batch(100 + step)).square().mean();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  }
  return losses;
}

}  // namespace

TEST_CASE(
    "full training streamed equals resident bit for bit: mode x depth x cache, gradients and 20 "
    "steps of AdamW and SGD") {
  auto reference = make_mlps();
  torch::optim::AdamW reference_adamw{parameters_of(reference),
                                      torch::optim::AdamWOptions(3e-2).weight_decay(0.1)};
  const auto expected =
      train(reference_adamw, [&](const at::Tensor& x) { return support::resident(reference, x); });
  auto reference_sgd_modules = make_mlps();
  torch::optim::SGD reference_sgd{parameters_of(reference_sgd_modules),
                                  torch::optim::SGDOptions(5e-2).momentum(0.9)};
  const auto expected_sgd = train(reference_sgd, [&](const at::Tensor& x) {
    return support::resident(reference_sgd_modules, x);
  });
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
      for (const bool cached : {false, true}) {
        INFO("detached " << (mode == bs::HostMode::detached) << " ahead " << ahead << " cached "
                         << cached);
        for (const bool sgd : {false, true}) {
          auto modules = make_mlps();
          auto blocks = support::blocks_of(modules);
          bs::Streamer streamer{blocks, bs::ram_storage_of(blocks), bs::HostBackend{mode},
                                train_options(ahead, cached)};
          streamer.train();
          const auto forward = [&](const at::Tensor& x) { return streamer.forward(x); };
          std::vector<at::Tensor> losses;
          if (sgd) {
            torch::optim::SGD optimizer{streamer.parameters(),
                                        torch::optim::SGDOptions(5e-2).momentum(0.9)};
            losses = train(optimizer, forward);
          } else {
            torch::optim::AdamW optimizer{streamer.parameters(),
                                          torch::optim::AdamWOptions(3e-2).weight_decay(0.1)};
            losses = train(optimizer, forward);
          }
          CHECK(support::same_values(losses, sgd ? expected_sgd : expected));
          const auto& same = sgd ? reference_sgd_modules : reference;
          CHECK(support::same_gradients(parameters_of(modules), parameters_of(same)));
          CHECK(support::same_values(parameters_of(modules), parameters_of(same)));
        }
      }
    }
  }
  CHECK(expected.back().item<float>() < 0.9F * expected.front().item<float>());
}
