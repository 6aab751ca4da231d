// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/device/copy_ranges.hpp>
#include <block_streamer/device/cuda_call.hpp>
#include <block_streamer/device/cuda_event.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/notify_thread.hpp>

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// Where a CudaBackend takes device memory from; both or none are set. The device is current in
/// both. `allocate` throws or returns 256-aligned memory, `release` does not throw.
struct DeviceMemoryResource {
  std::function<void*(std::size_t byte_count)> allocate;
  std::function<void(void* memory, std::size_t byte_count)> release;
};

struct CudaProperties {
  std::string name;
  std::uint64_t total_byte_count = 0;
  std::uint64_t free_byte_count = 0;  ///< at the time of the call
  int compute_capability = 0;         ///< 90 for 9.0
};

/// @brief One CUDA device through the CUDA runtime. Streams do not synchronize with the legacy
/// default stream; events carry no time (make_timing_event does).
/// **Threads.** Everything from any thread; the calling thread's current device is left as found.
/// One thread of the backend waits for events in the order of `notify` and calls back there, never
/// inside the driver. The handle is shared by its copies, hence the shared_ptr.
/// **Errors.** DeviceError names the call, the bytes, the device and CUDA's reason; `sticky()`
/// tells a lost context from a refusal. No refusal leaves a pending error behind.
/// **Cost.** No allocation after the make_ calls but for a record that replaces one still waited
/// for. **Lifetime.** The last copy delivers all notifications first. Objects may outlive the
/// driver at the program's exit.
class CudaBackend {
 public:
  using NativeStream = cudaStream_t;

  class DeviceBuffer;
  class HostRegistration;
  class Stream;
  class Event;

  /// @brief Number of usable devices; 0 without a driver.
  [[nodiscard]] static int device_count() noexcept { return cuda_device_count(); }
  /// @brief The reason for which there is none, for a message.
  [[nodiscard]] static std::optional<std::string> why_unusable() { return why_cuda_is_unusable(); }

  /// @param device 0-based, as the runtime counts.
  /// @throws DeviceError if it cannot be used.
  explicit CudaBackend(int device = 0, DeviceMemoryResource resource = {});

  [[nodiscard]] int device() const noexcept { return shared_->device; }
  /// @throws DeviceError if the device does not answer.
  [[nodiscard]] CudaProperties properties() const;

  /// @throws DeviceError if there is not so much memory.
  [[nodiscard]] DeviceBuffer allocate_device(std::size_t byte_count);
  [[nodiscard]] std::span<std::byte> bytes(const DeviceBuffer& buffer) const noexcept;
  /// @brief Page-locks exactly `memory`, for all devices. @throws DeviceError if the device is
  /// lost.
  [[nodiscard]] std::optional<HostRegistration> register_host(std::span<std::byte> memory);
  [[nodiscard]] bool host_addressable() const noexcept { return false; }

  [[nodiscard]] Stream make_stream();
  [[nodiscard]] Stream borrow_stream(NativeStream native);
  [[nodiscard]] Event make_event();
  /// @brief An event for `elapsed`. Dearer to record; for traces.
  [[nodiscard]] Event make_timing_event();
  /// @brief Device time between two records of timing events that were both passed.
  [[nodiscard]] Nanoseconds elapsed(Event& begin, Event& end);

  void record(Event& event, Stream& stream);
  void wait(Stream& stream, Event& event);
  [[nodiscard]] bool query(Event& event);
  void synchronize(Event& event);
  void notify(Event& event, IoCompletion reached);
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, CopyDirection direction,
                  Stream& stream);

  void touch_on_stream(std::span<const std::byte>, Access, Stream&) noexcept {}
  void touch_on_host(std::span<const std::byte>, Access) noexcept {}
  [[nodiscard]] Nanoseconds now() const noexcept {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
  [[nodiscard]] std::string name() const { return "cuda:" + std::to_string(device()); }

 private:
  struct Shared {
    Shared(int d, DeviceMemoryResource r)
        : device{d}, resource{std::make_shared<const DeviceMemoryResource>(std::move(r))} {}
    const int device;
    const std::shared_ptr<const DeviceMemoryResource> resource;  // with the buffers
    detail::NotifyThread<detail::CudaPoint> notifier;
  };
  void* take_memory(std::size_t byte_count);
  static detail::CudaEventState& state_of(Event& event);
  static cudaStream_t native_of(Stream& stream);

  std::shared_ptr<Shared> shared_;
};

/// Device memory, not initialised. It keeps the resource that it came from.
class CudaBackend::DeviceBuffer {
 public:
  DeviceBuffer() noexcept = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer{std::move(other)}.swap(*this);
    return *this;
  }
  ~DeviceBuffer() {
    if (memory_ == nullptr) return;
    detail::cuda_release(device_, [this] {
      if (!resource_->release) return cudaFree(memory_);
      resource_->release(memory_, byte_count_);
      return cudaSuccess;
    });
  }

 private:
  friend class CudaBackend;
  void swap(DeviceBuffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(resource_, other.resource_);
    std::swap(memory_, other.memory_);
    std::swap(byte_count_, other.byte_count_);
  }
  int device_ = 0;
  std::shared_ptr<const DeviceMemoryResource> resource_;
  void* memory_ = nullptr;
  std::size_t byte_count_ = 0;
};

/// A page lock; empty for no bytes.
class CudaBackend::HostRegistration {
 public:
  HostRegistration() noexcept = default;
  HostRegistration(HostRegistration&& other) noexcept
      : device_{other.device_}, memory_{std::exchange(other.memory_, nullptr)} {}
  HostRegistration& operator=(HostRegistration&& other) noexcept {
    HostRegistration taken{std::move(other)};
    std::swap(device_, taken.device_);
    std::swap(memory_, taken.memory_);
    return *this;
  }
  ~HostRegistration() {
    if (memory_ == nullptr) return;
    detail::cuda_release(device_, [this] { return cudaHostUnregister(memory_); });
  }

 private:
  friend class CudaBackend;
  int device_ = 0;
  void* memory_ = nullptr;
};

/// A stream of the backend's own, or somebody else's for as long as that lives.
class CudaBackend::Stream {
 public:
  Stream(Stream&& other) noexcept : stream_{std::exchange(other.stream_, {})} {}
  Stream& operator=(Stream&& other) noexcept {
    Stream taken{std::move(other)};
    std::swap(stream_, taken.stream_);
    return *this;
  }
  ~Stream() {
    if (!stream_.owned) return;
    detail::cuda_release(stream_.device, [this] { return cudaStreamDestroy(stream_.native); });
  }
  /// What LibTorch and kernels take.
  [[nodiscard]] cudaStream_t native() const noexcept { return stream_.native; }

 private:
  friend class CudaBackend;
  struct Handle {
    cudaStream_t native = nullptr;
    int device = 0;
    bool valid = false;  // a null native stream is CUDA's default one
    bool owned = false;
  };
  explicit Stream(Handle handle) noexcept : stream_{handle} {}
  Handle stream_;
};

class CudaBackend::Event {
 private:
  friend class CudaBackend;
  explicit Event(std::unique_ptr<detail::CudaEventState> state) : state_{std::move(state)} {}
  std::unique_ptr<detail::CudaEventState> state_;
};

inline CudaBackend::CudaBackend(int device, DeviceMemoryResource resource) {
  const int count = device_count();
  if (device < 0 || device >= count) {
    const auto reason = why_unusable();
    throw DeviceError{
        "cuda:" + std::to_string(device) + ": " +
            (reason ? *reason : "there are " + std::to_string(count) + " devices, from 0 up"),
        static_cast<int>(cudaErrorInvalidDevice)};
  }
  expects(!resource.allocate == !resource.release, "a memory resource allocates and releases");
  detail::cuda_on_device(device, "cudaFree", [] { return cudaFree(nullptr); });  // makes a context
  try {
    shared_ = std::make_shared<Shared>(device, std::move(resource));
  } catch (const std::system_error& error) {
    throw DeviceError{"cuda:" + std::to_string(device) + ": cannot start a thread: " + error.what(),
                      error.code().value()};
  }
}

inline CudaProperties CudaBackend::properties() const {
  CudaProperties properties;
  cudaDeviceProp raw{};
  std::size_t free = 0;
  std::size_t total = 0;
  detail::cuda_on_device(device(), "cudaGetDeviceProperties",
                         [&] { return cudaGetDeviceProperties(&raw, device()); });
  detail::cuda_on_device(device(), "cudaMemGetInfo", [&] { return cudaMemGetInfo(&free, &total); });
  properties.name = raw.name;
  properties.total_byte_count = total;
  properties.free_byte_count = free;
  properties.compute_capability = raw.major * 10 + raw.minor;
  return properties;
}

inline void* CudaBackend::take_memory(std::size_t byte_count) {
  void* memory = nullptr;
  if (!shared_->resource->allocate) {
    detail::cuda_on_device(
        device(), "cudaMalloc", [&] { return cudaMalloc(&memory, byte_count); }, byte_count);
    return memory;
  }
  const detail::DeviceGuard guard{device()};
  detail::cuda_call(guard.error(), "cudaSetDevice", device());
  try {
    memory = shared_->resource->allocate(byte_count);
  } catch (const std::exception& error) {
    throw DeviceError{
        name() + ": allocation of " + std::to_string(byte_count) + " bytes: " + error.what(),
        static_cast<int>(cudaErrorMemoryAllocation)};
  }
  return memory;
}

inline CudaBackend::DeviceBuffer CudaBackend::allocate_device(std::size_t byte_count) {
  DeviceBuffer buffer;
  if (byte_count == 0) return buffer;
  buffer.device_ = device();
  buffer.resource_ = shared_->resource;
  buffer.byte_count_ = byte_count;
  buffer.memory_ = take_memory(byte_count);
  expects(buffer.memory_ != nullptr &&
              reinterpret_cast<std::uintptr_t>(buffer.memory_) % tensor_alignment == 0,
          "a memory resource returns 256-aligned memory");
  return buffer;
}

inline std::span<std::byte> CudaBackend::bytes(const DeviceBuffer& buffer) const noexcept {
  if (buffer.memory_ == nullptr) return {};
  return {static_cast<std::byte*>(buffer.memory_), buffer.byte_count_};
}

inline std::optional<CudaBackend::HostRegistration> CudaBackend::register_host(
    std::span<std::byte> memory) {
  HostRegistration registration;
  if (memory.empty()) return registration;  // CUDA refuses 0 bytes and remembers that it did
  const detail::DeviceGuard guard{device()};
  detail::cuda_call(guard.error(), "cudaSetDevice", device());
  const cudaError_t error =
      cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable);
  if (is_sticky_cuda_error(error)) {
    detail::throw_cuda_error(error, "cudaHostRegister", device(), memory.size());
  }
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return std::nullopt;
  }
  registration.device_ = device();
  registration.memory_ = memory.data();
  return registration;
}

inline CudaBackend::Stream CudaBackend::make_stream() {
  cudaStream_t native = nullptr;
  detail::cuda_on_device(device(), "cudaStreamCreateWithFlags",
                         [&] { return cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking); });
  return Stream{{native, device(), true, true}};
}

inline CudaBackend::Stream CudaBackend::borrow_stream(NativeStream native) {
  return Stream{{native, device(), true, false}};
}

inline CudaBackend::Event CudaBackend::make_event() {
  return Event{std::make_unique<detail::CudaEventState>(
      device(), cudaEventDisableTiming | cudaEventBlockingSync)};
}

inline CudaBackend::Event CudaBackend::make_timing_event() {
  return Event{std::make_unique<detail::CudaEventState>(device(), cudaEventBlockingSync)};
}

inline Nanoseconds CudaBackend::elapsed(Event& begin, Event& end) {
  const detail::CudaRecord from = state_of(begin).latest();
  const detail::CudaRecord to = state_of(end).latest();
  float milliseconds = 0;
  detail::cuda_on_device(device(), "cudaEventElapsedTime", [&] {
    return cudaEventElapsedTime(&milliseconds, from->get(), to->get());
  });
  return std::chrono::duration_cast<Nanoseconds>(
      std::chrono::duration<double, std::milli>{milliseconds});
}

inline void CudaBackend::record(Event& event, Stream& stream) {
  state_of(event).record(native_of(stream));
}

inline void CudaBackend::wait(Stream& stream, Event& event) {
  state_of(event).wait_on(native_of(stream));
}

inline bool CudaBackend::query(Event& event) {
  const detail::CudaRecord record = state_of(event).latest();
  bool passed = false;
  detail::cuda_on_device(device(), "cudaEventQuery", [&] {
    const cudaError_t error = cudaEventQuery(record->get());
    passed = error == cudaSuccess;
    if (error != cudaErrorNotReady) return error;
    (void)cudaGetLastError();  // "not ready" is remembered like an error
    return cudaSuccess;
  });
  return passed;
}

inline void CudaBackend::synchronize(Event& event) {
  const detail::CudaRecord record = state_of(event).latest();
  detail::cuda_on_device(device(), "cudaEventSynchronize",
                         [&] { return cudaEventSynchronize(record->get()); });
}

inline void CudaBackend::notify(Event& event, IoCompletion reached) {
  detail::CudaRecord record = event.state_ ? event.state_->try_latest() : nullptr;
  if (!record) return reached(std::make_error_code(std::errc::invalid_argument), 0);
  shared_->notifier.post({std::move(record)}, std::move(reached));
}

inline void CudaBackend::copy_async(std::span<std::byte> to, std::span<const std::byte> from,
                                    CopyDirection direction, Stream& stream) {
  detail::expects_copyable(to, from);
  const cudaStream_t native = native_of(stream);
  if (to.empty()) return;
  const cudaMemcpyKind kind = direction == CopyDirection::host_to_device ? cudaMemcpyHostToDevice
                              : direction == CopyDirection::device_to_host
                                  ? cudaMemcpyDeviceToHost
                                  : cudaMemcpyDeviceToDevice;
  detail::cuda_on_device(
      device(), "cudaMemcpyAsync",
      [&] { return cudaMemcpyAsync(to.data(), from.data(), to.size(), kind, native); }, to.size());
}

inline detail::CudaEventState& CudaBackend::state_of(Event& event) {
  expects(event.state_ != nullptr, "use of a moved-from event");
  return *event.state_;
}

inline cudaStream_t CudaBackend::native_of(Stream& stream) {
  expects(stream.stream_.valid, "use of a moved-from stream");
  return stream.stream_.native;
}

static_assert(borrowed_stream_backend<CudaBackend>);

}  // namespace block_streamer::inline v1
