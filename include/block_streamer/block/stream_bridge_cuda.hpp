// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/stream_bridge.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/device/cuda_backend.hpp>

#include <c10/cuda/CUDAStream.h>

#include <optional>

namespace block_streamer::inline v1 {

/// @brief LibTorch's current stream of the backend's device, asked anew for every pass: callers may
/// change it in between. One that is being recorded in a graph is refused: waits for what came
/// before would spoil the recording, and what it recorded the events of later passes. For
/// CudaBackend and for decorators of it.
template <borrowed_stream_backend Backend>
class StreamBridge<Backend> {
 public:
  static constexpr bool computes_on_host = false;
  explicit StreamBridge(Backend& backend) : backend_{backend}, device_{backend.name()} {}
  [[nodiscard]] at::Device device() const { return device_; }
  [[nodiscard]] typename Backend::Stream& current() {
    const auto native = c10::cuda::getCurrentCUDAStream(device_.index());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(native.stream(), &status) == cudaSuccess &&
        status != cudaStreamCaptureStatusNone) {
      throw UnsupportedError{
          "LibTorch's current stream is being recorded in a graph, which a streamed pass cannot "
          "join: capture() and capture_step() record passes"};
    }
    stream_.emplace(backend_.borrow_stream(native.stream()));
    return *stream_;
  }

 private:
  Backend backend_;
  at::Device device_;
  std::optional<typename Backend::Stream> stream_;
};

}  // namespace block_streamer::inline v1
