// SPDX-License-Identifier: Apache-2.0
#include "runner.hpp"

#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/device/cuda_backend.hpp>
#include <block_streamer/device/metered_backend.hpp>

#include <c10/cuda/CUDACachingAllocator.h>

namespace block_streamer_cli {

std::optional<std::string> why_cuda_is_off() {
  return block_streamer::CudaBackend::why_unusable();
}

std::unique_ptr<ModelRunner> open_cuda_runner(const CommonOptions& options, int device) {
  return translated([&] {
    using Backend = block_streamer::MeteredBackend<block_streamer::CudaBackend>;
    const auto index = static_cast<at::DeviceIndex>(device);
    const auto torch_peak = [index] {
      const auto peak =
          c10::cuda::CUDACachingAllocator::getDeviceStats(index).allocated_bytes[0].peak;
      return static_cast<std::uint64_t>(peak);  // of all pools together
    };
    return std::make_unique<Runner<Backend>>(Backend{block_streamer::CudaBackend{device}},
                                             at::Device{at::kCUDA, index}, options, torch_peak);
  });
}

}  // namespace block_streamer_cli
