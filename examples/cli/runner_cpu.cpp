// SPDX-License-Identifier: Apache-2.0
#include "runner.hpp"

#include <block_streamer/device/host_backend.hpp>

namespace block_streamer_cli {

std::unique_ptr<ModelRunner> open_cpu_runner(const CommonOptions& options) {
  return translated([&] {
    return std::make_unique<Runner<block_streamer::HostBackend>>(block_streamer::HostBackend{},
                                                                 at::Device{at::kCPU}, options);
  });
}

}  // namespace block_streamer_cli
