// SPDX-License-Identifier: Apache-2.0
#include "full_runner.hpp"
#include "runner.hpp"

#include <block_streamer/device/host_backend.hpp>

namespace block_streamer_cli {

std::unique_ptr<ModelRunner> open_cpu_runner(const CommonOptions& options) {
  return translated([&] {
    return std::make_unique<Runner<block_streamer::HostBackend>>(block_streamer::HostBackend{},
                                                                 at::Device{at::kCPU}, options,
                                                                 std::function<std::uint64_t()>{});
  });
}

std::unique_ptr<TrainingRunner> open_cpu_full_runner(const CommonOptions& options,
                                                     const FinetuneOptions& finetune) {
  return translated([&] {
    return std::make_unique<FullRunner<block_streamer::HostBackend>>(
        block_streamer::HostBackend{}, at::Device{at::kCPU}, options,
        std::function<std::uint64_t()>{}, finetune);
  });
}

}  // namespace block_streamer_cli
