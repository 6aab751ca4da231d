// SPDX-License-Identifier: Apache-2.0
#include "full_runner.hpp"
#include "runner.hpp"

#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/device/cuda_backend.hpp>

namespace block_streamer_cli {

std::optional<std::string> why_cuda_is_off() {
  return block_streamer::CudaBackend::why_unusable();
}

std::unique_ptr<ModelRunner> open_cuda_runner(const CommonOptions& options, int device) {
  return translated([&] {
    block_streamer::CudaBackend backend{device};
    const at::Device torch_device{at::kCUDA, static_cast<at::DeviceIndex>(device)};
    return std::make_unique<Runner<block_streamer::CudaBackend>>(std::move(backend), torch_device,
                                                                 options);
  });
}

std::unique_ptr<TrainingRunner> open_cuda_full_runner(const CommonOptions& options,
                                                      const FinetuneOptions& finetune, int device) {
  return translated([&] {
    block_streamer::CudaBackend backend{device};
    const at::Device torch_device{at::kCUDA, static_cast<at::DeviceIndex>(device)};
    return std::make_unique<FullRunner<block_streamer::CudaBackend>>(
        std::move(backend), torch_device, options, finetune);
  });
}

}  // namespace block_streamer_cli
