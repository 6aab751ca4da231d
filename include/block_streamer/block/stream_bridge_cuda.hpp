// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/stream_bridge.hpp>
#include <block_streamer/device/cuda_backend.hpp>

#include <c10/cuda/CUDAStream.h>

#include <optional>

namespace block_streamer::inline v1 {

/// @brief LibTorch's current stream of the backend's device, asked anew for every pass: callers may
/// change it in between. For CudaBackend and for decorators of it.
template <borrowed_stream_backend Backend>
class StreamBridge<Backend> {
 public:
  static constexpr bool computes_on_host = false;
  explicit StreamBridge(Backend& backend) : backend_{backend}, device_{backend.name()} {}
  [[nodiscard]] at::Device device() const { return device_; }
  [[nodiscard]] typename Backend::Stream& current() {
    const auto native = c10::cuda::getCurrentCUDAStream(device_.index());
    stream_.emplace(backend_.borrow_stream(native.stream()));
    return *stream_;
  }

 private:
  Backend backend_;
  at::Device device_;
  std::optional<typename Backend::Stream> stream_;
};

}  // namespace block_streamer::inline v1
