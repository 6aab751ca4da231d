// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/device_graph.hpp>
#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/device/cuda_call.hpp>

#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

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

/// @brief Random numbers that a recorded pass draws twice, block by block: a recompute draws those
/// of the first time. A graph counts what it draws from a generator from the place where that is at
/// each replay; so each block's second time has a generator state of its own, which is put where
/// the first time will begin.
class CudaRepeatedRandom {
 public:
  CudaRepeatedRandom(at::Device device, std::size_t count)
      : own_{at::cuda::detail::getDefaultCUDAGenerator(device.index())}, places_(count) {
    for (Place& place : places_) place.state = own_.clone();
  }
  void register_with(at::cuda::CUDAGraph& graph) {
    for (const Place& place : places_) graph.register_generator_state(place.state);
  }
  void mark(std::size_t i) { places_[i].begin = drawn(); }
  [[nodiscard]] std::shared_ptr<void> again(std::size_t i) {
    return std::make_shared<Turn>(*this, places_[i]);
  }
  void before_replay() {
    const std::lock_guard lock{own_.mutex()};
    const std::uint64_t seed = own_.current_seed(), offset = own_.get_offset();
    for (Place& place : places_) {
      if (!place.draws) continue;
      place.state.set_current_seed(seed);
      place.state.set_offset(offset + place.begin);
    }
  }

 private:
  struct Place {
    at::Generator state;
    std::uint64_t begin = 0;  ///< numbers drawn in the graph before
    bool draws = false;
  };
  /// While it lives LibTorch draws from another state.
  class Turn {
   public:
    Turn(CudaRepeatedRandom& random, Place& place)
        : random_{random}, place_{place}, callers_{random.own().graphsafe_get_state()} {
      const std::lock_guard lock{random_.own_.mutex()};
      random_.own().graphsafe_set_state(place.state.getIntrusivePtr());
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
      place_.draws = random_.drawn() > 0;
      const std::lock_guard lock{random_.own_.mutex()};
      random_.own().graphsafe_set_state(callers_);
    }

   private:
    CudaRepeatedRandom& random_;
    Place& place_;
    c10::intrusive_ptr<c10::GeneratorImpl> callers_;
  };

  [[nodiscard]] at::CUDAGeneratorImpl& own() {
    return *at::check_generator<at::CUDAGeneratorImpl>(own_);
  }
  /// In this recording so far.
  [[nodiscard]] std::uint64_t drawn() {
    const std::lock_guard lock{own_.mutex()};
    return own().philox_cuda_state(0).offset_intragraph_;
  }

  at::Generator own_;  ///< LibTorch's own of the device
  std::vector<Place> places_;
};

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

  using RepeatedRandom = detail::CudaRepeatedRandom;

  template <class Work>
  void record(Work&& work, RepeatedRandom* random = nullptr) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    const auto pool = at::cuda::graph_pool_handle();
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    try {
      if (random != nullptr) random->register_with(*graph);
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
