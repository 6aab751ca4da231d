// SPDX-License-Identifier: Apache-2.0
#include "mapped_by_hand.hpp"
#include "page_lock_benchmark.hpp"

#include <block_streamer/device/cuda_backend.hpp>

#include <cuda_runtime_api.h>

#include <stdexcept>

namespace block_streamer_benchmarks {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error{cudaGetErrorString(error)};
}

StartUp registered_by_hand(std::size_t byte_count) {
  const Stopwatch all;
  MappedByHand memory{byte_count};
  first_touch(memory.bytes());
  const Stopwatch lock;
  check(cudaHostRegister(memory.bytes().data(), byte_count, cudaHostRegisterPortable));
  const StartUp took{all.seconds(), lock.seconds()};
  check(cudaHostUnregister(memory.bytes().data()));
  return took;
}

StartUp host_alloc(std::size_t byte_count) {
  const Stopwatch all;
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, byte_count, cudaHostAllocPortable));
  first_touch({static_cast<std::byte*>(memory), byte_count});
  const StartUp took{all.seconds(), 0};
  check(cudaFreeHost(memory));
  return took;
}

}  // namespace

void run_page_lock_on_cuda(const PageLockOptions& options, Report& report) {
  if (const auto why = bs::CudaBackend::why_unusable()) {
    std::printf("skipped: no usable CUDA device: %s\n", why->c_str());
    return;
  }
  bs::CudaBackend backend{0};
  std::printf("device: %s\n", backend.properties().name.c_str());
  PageLockBenchmark<bs::CudaBackend> page_lock{
      backend, options, report, registered_by_hand, {{"cudaHostAlloc", host_alloc}}};
  page_lock.register_all();
  benchmark::RunSpecifiedBenchmarks();
}

}  // namespace block_streamer_benchmarks
