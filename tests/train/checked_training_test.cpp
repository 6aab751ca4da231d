// SPDX-License-Identifier: Apache-2.0
#include "mlps.hpp"

#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/optim/sgd.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;

TEST_CASE(
    "every access to gradients on their way out is ordered, and masters are free afterwards") {
  using Backend = bs::CheckedBackend<bs::HostBackend>;
  for (const std::uint32_t ahead : {0U, 2U}) {
    for (const bool in_step : {false, true}) {
      Backend backend{bs::HostBackend{bs::HostMode::detached}};
      auto modules = support::make_mlps();
      {
        auto blocks = support::blocks_of(modules);
        auto storage = bs::ram_storage_of(blocks);
        bs::Streamer streamer{std::move(blocks), std::move(storage), backend,
                              support::train_options(ahead), bs::Sgd{}};
        streamer.train();
        const auto write_masters = [&] {
          for (const auto& parameter : streamer.parameters()) {
            backend.touch_on_host(bs::bytes_of(parameter), bs::Access::write);
            const c10::NoGradGuard no_grad;
            parameter.mul_(0.99);
          }
        };
        for (int step = 0; step < 3; ++step) {
          auto loss = streamer.forward(batch()).square().sum();
          if (in_step) streamer.begin_step({1, 1e-3, 1});
          loss.backward();
          if (in_step) streamer.end_step();
          if (!in_step) streamer.forward(batch(1)).sum().backward();  // adds to .grad
          write_masters();
          {
            const c10::NoGradGuard no_grad;
            (void)streamer.forward(batch());
          }
          write_masters();
        }
      }
      INFO(to_string(backend.log()));
      CHECK(backend.log().empty());
    }
  }
}
