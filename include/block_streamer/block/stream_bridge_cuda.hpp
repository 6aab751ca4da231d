// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/stream_bridge.hpp>
#include <block_streamer/device/cuda_backend.hpp>

#include <c10/cuda/CUDAStream.h>

#include <optional>

namespace block_streamer::inline v1 {

/// @brief LibTorch's current stream of the backend's device, asked anew for every pass: callers may
/// change it in between.
template <>
class StreamBridge<CudaBackend> {
 public:
  static constexpr bool computes_on_host = false;
  explicit StreamBridge(CudaBackend& backend) : backend_{backend} {}
  [[nodiscard]] at::Device device() const {
    return at::Device{at::kCUDA, static_cast<at::DeviceIndex>(backend_.device())};
  }
  [[nodiscard]] CudaBackend::Stream& current() {
    const auto native =
        c10::cuda::getCurrentCUDAStream(static_cast<at::DeviceIndex>(backend_.device()));
    stream_.emplace(backend_.borrow_stream(native.stream()));
    return *stream_;
  }

 private:
  CudaBackend backend_;
  std::optional<CudaBackend::Stream> stream_;
};

}  // namespace block_streamer::inline v1
