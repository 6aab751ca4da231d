// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/device/cuda_call.hpp>

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1::detail {

/// One event of the runtime, owned.
class NativeEvent {
 public:
  NativeEvent(int device, unsigned flags) : device_{device} {
    cuda_on_device(device, "cudaEventCreateWithFlags",
                   [&] { return cudaEventCreateWithFlags(&event_, flags); });
  }
  NativeEvent(const NativeEvent&) = delete;
  NativeEvent& operator=(const NativeEvent&) = delete;
  ~NativeEvent() {
    cuda_release(device_, [this] { return cudaEventDestroy(event_); });
  }
  [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }
  [[nodiscard]] int device() const noexcept { return device_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

/// What a waiter keeps of one record: shared, so that neither the event's next record nor its end
/// changes what is waited for.
using CudaRecord = std::shared_ptr<NativeEvent>;

/// @brief The state of a CudaBackend::Event. A record that somebody waits for is left to them, and
/// the next one takes a new native event; so each wait is for the record that was latest then.
/// **Threads.** One mutex. **Cost.** Nothing is allocated unless a record is still being waited
/// for.
class CudaEventState {
 public:
  CudaEventState(int device, unsigned flags)
      : flags_{flags}, native_{std::make_shared<NativeEvent>(device, flags)} {}

  void record(cudaStream_t stream) {
    const std::lock_guard lock{mutex_};
    const int device = native_->device();
    if (native_.use_count() > 1) native_ = std::make_shared<NativeEvent>(device, flags_);
    recorded_ = false;
    cuda_on_device(device, "cudaEventRecord",
                   [&] { return cudaEventRecord(native_->get(), stream); });
    recorded_ = true;
  }

  void wait_on(cudaStream_t stream) {
    const std::lock_guard lock{mutex_};
    expects(recorded_, "the event was never recorded");
    cuda_on_device(native_->device(), "cudaStreamWaitEvent",
                   [&] { return cudaStreamWaitEvent(stream, native_->get(), 0); });
  }

  /// @returns null if it was never recorded.
  [[nodiscard]] CudaRecord try_latest() {
    const std::lock_guard lock{mutex_};
    return recorded_ ? native_ : nullptr;
  }
  [[nodiscard]] CudaRecord latest() {
    CudaRecord record = try_latest();
    expects(record != nullptr, "the event was never recorded");
    return record;
  }

 private:
  const unsigned flags_;
  std::mutex mutex_;
  CudaRecord native_;
  bool recorded_ = false;
};

/// A record as the notifying thread waits for it.
struct CudaPoint {
  CudaRecord record;

  std::error_code block() const noexcept {
    // The thread is the backend's own and stays on its device.
    cudaError_t error = cudaSetDevice(record->device());
    if (error == cudaSuccess) error = cudaEventSynchronize(record->get());
    if (error == cudaSuccess) return {};
    (void)cudaGetLastError();
    return std::make_error_code(std::errc::io_error);
  }
};

}  // namespace block_streamer::inline v1::detail
