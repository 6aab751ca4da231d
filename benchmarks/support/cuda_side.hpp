// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/device/cuda_backend.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace block_streamer_benchmarks {

namespace bs = block_streamer;

/// CUDA device 0. Counts what the backend allocates.
class CudaSide {
 public:
  using Backend = bs::CudaBackend;
  static constexpr bool is_device = true;

  CudaSide() {
    (void)at::zeros({1}, at::TensorOptions{}.device(device()));
  }  // starts LibTorch's CUDA

  [[nodiscard]] Backend backend() const {
    const auto held = held_;
    return Backend{0,
                   {[held](std::size_t byte_count) {
                      void* memory = nullptr;
                      bs::detail::cuda_call(cudaMalloc(&memory, byte_count), "cudaMalloc", 0,
                                            byte_count);
                      *held += byte_count;
                      return memory;
                    },
                    [held](void* memory, std::size_t byte_count) {
                      (void)cudaFree(memory);
                      *held -= byte_count;
                    }}};
  }
  [[nodiscard]] at::Device device() const { return at::Device{at::kCUDA, 0}; }
  void synchronize() { bs::detail::cuda_call(cudaDeviceSynchronize(), "cudaDeviceSynchronize", 0); }

  [[nodiscard]] std::uint64_t allocated() const {
    return static_cast<std::uint64_t>(use().current);
  }
  [[nodiscard]] std::uint64_t peak() const { return static_cast<std::uint64_t>(use().peak); }
  void reset_peak() { c10::cuda::CUDACachingAllocator::resetPeakStats(0); }
  [[nodiscard]] std::uint64_t backend_bytes() const { return *held_; }

  /// Two places on the device and a stream of its own.
  class Probe {
   public:
    explicit Probe(std::size_t byte_count)
        : backend_{0},
          place_bytes_{bs::round_up(byte_count, 256)},
          buffer_{backend_.allocate_device(2 * place_bytes_)},
          stream_{backend_.make_stream()},
          done_{backend_.make_event()} {}
    void copy(std::span<const std::byte> from, std::size_t place) {
      backend_.copy_async(backend_.bytes(buffer_).subspan(place * place_bytes_, from.size()), from,
                          bs::CopyDirection::host_to_device, stream_);
    }
    void finish() {
      backend_.record(done_, stream_);
      backend_.synchronize(done_);
    }

   private:
    Backend backend_;
    std::size_t place_bytes_;
    Backend::DeviceBuffer buffer_;
    Backend::Stream stream_;
    Backend::Event done_;
  };
  [[nodiscard]] Probe probe(std::size_t byte_count) const { return Probe{byte_count}; }

 private:
  [[nodiscard]] static c10::CachingAllocator::Stat use() {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0)
        .allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  }
  std::shared_ptr<std::atomic<std::uint64_t>> held_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
};

}  // namespace block_streamer_benchmarks
