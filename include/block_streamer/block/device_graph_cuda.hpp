// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/device_graph.hpp>
#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/device/cuda_call.hpp>

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <utility>

namespace block_streamer::inline v1 {

namespace detail {

/// A stream that nobody else has: LibTorch's kernels keep workspaces for each stream, and a graph
/// keeps their addresses.
class OwnCudaStream {
 public:
  explicit OwnCudaStream(at::Device device) : device_{device} {
    cuda_on_device(device.index(), "cudaStreamCreateWithFlags",
                   [&] { return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); });
  }
  OwnCudaStream(const OwnCudaStream&) = delete;
  OwnCudaStream& operator=(const OwnCudaStream&) = delete;
  ~OwnCudaStream() {
    cuda_release(device_.index(), [this] { return cudaStreamDestroy(stream_); });
  }
  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

 private:
  at::Device device_;
  cudaStream_t stream_ = nullptr;
};

/// @brief Puts right what a recording that failed leaves behind: the stream's mode, the memory pool
/// of LibTorch's allocator, and its random numbers, which count a graph's apart until a recording
/// ends well.
inline void abandon_recording(c10::cuda::CUDAStream stream,
                              std::pair<std::uint64_t, std::uint64_t> pool,
                              std::unique_ptr<at::cuda::CUDAGraph> graph) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  (void)cudaStreamIsCapturing(stream.stream(), &status);
  if (status != cudaStreamCaptureStatusNone) {
    cudaGraph_t rest = nullptr;
    (void)cudaStreamEndCapture(stream.stream(), &rest);
    if (rest != nullptr) (void)cudaGraphDestroy(rest);
  }
  (void)cudaGetLastError();
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(stream.device_index(), pool);
    c10::cuda::CUDACachingAllocator::releasePool(stream.device_index(), pool);
  } catch (...) {  // the graph had ended that already
  }
  graph.reset();
  try {
    const at::Tensor place = at::zeros({1}, at::TensorOptions{}.device(stream.device()));
    at::cuda::CUDAGraph good;
    good.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    place.zero_();
    good.capture_end();
  } catch (...) {  // a device that is lost needs no random numbers
  }
}

}  // namespace detail

/// @brief CUDA graphs through LibTorch's, so that memory and random numbers of what is recorded are
/// the graph's own. For CudaBackend and for decorators of it.
/// **Threads.** Other threads may use the device during a recording.
/// **Cost.** A graph keeps the memory of everything that one pass of it allocates.
template <borrowed_stream_backend Backend>
class DeviceGraph<Backend> {
 public:
  static constexpr bool supported = true;

  class Side {
   public:
    Side(Backend backend, at::Device device)
        : backend_{std::move(backend)},
          device_{device},
          stream_{device},
          own_{backend_.borrow_stream(stream_.get())},
          crossed_{backend_.make_event()} {}
    template <class Work>
    void run(Work&& work) {
      auto callers =
          backend_.borrow_stream(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
      cross(callers, own_);
      try {
        const c10::cuda::CUDAStreamGuard guard{
            c10::cuda::getStreamFromExternal(stream_.get(), device_.index())};
        work();
      } catch (...) {
        cross(own_, callers);
        throw;
      }
      cross(own_, callers);
    }

   private:
    using Stream = typename Backend::Stream;
    void cross(Stream& from, Stream& to) {
      backend_.record(crossed_, from);
      backend_.wait(to, crossed_);
    }
    Backend backend_;
    at::Device device_;
    detail::OwnCudaStream stream_;
    Stream own_;
    typename Backend::Event crossed_;
  };

  template <class Work>
  void record(Work&& work) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    const auto pool = at::cuda::graph_pool_handle();
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    try {
      graph->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
      work();
      graph->capture_end();
    } catch (...) {
      detail::abandon_recording(stream, pool, std::move(graph));
      throw;
    }
    graph_ = std::move(graph);
  }
  void expect_recording() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error =
        cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream().stream(), &status);
    if (error == cudaSuccess && status == cudaStreamCaptureStatusActive) return;
    (void)cudaGetLastError();
    throw UnsupportedError{"it did what a CUDA graph cannot record, and went on"};
  }
  void replay() { graph_->replay(); }

 private:
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

}  // namespace block_streamer::inline v1
