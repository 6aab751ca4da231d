// SPDX-License-Identifier: Apache-2.0
#include "full_runner.hpp"
#include "runner.hpp"

#include <block_streamer/block/device_graph_cuda.hpp>
#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/device/cuda_backend.hpp>
#include <block_streamer/device/metered_backend.hpp>

#include <c10/cuda/CUDACachingAllocator.h>

namespace block_streamer_cli {

std::optional<std::string> why_cuda_is_off() {
  return block_streamer::CudaBackend::why_unusable();
}

namespace {

using Backend = block_streamer::MeteredBackend<block_streamer::CudaBackend>;

[[nodiscard]] at::Device torch_device(int device) {
  return {at::kCUDA, static_cast<at::DeviceIndex>(device)};
}
[[nodiscard]] std::function<std::uint64_t()> torch_peak(int device) {
  return [index = static_cast<at::DeviceIndex>(device)] {
    const auto peak =
        c10::cuda::CUDACachingAllocator::getDeviceStats(index).allocated_bytes[0].peak;
    return static_cast<std::uint64_t>(peak);  // of all pools together
  };
}

}  // namespace

std::unique_ptr<ModelRunner> open_cuda_runner(const CommonOptions& options, int device) {
  return translated([&] {
    return std::make_unique<Runner<Backend>>(Backend{block_streamer::CudaBackend{device}},
                                             torch_device(device), options, torch_peak(device));
  });
}

std::unique_ptr<TrainingRunner> open_cuda_full_runner(const CommonOptions& options,
                                                      const FinetuneOptions& finetune, int device) {
  return translated([&] {
    return std::make_unique<FullRunner<Backend>>(Backend{block_streamer::CudaBackend{device}},
                                                 torch_device(device), options, torch_peak(device),
                                                 finetune);
  });
}

}  // namespace block_streamer_cli
