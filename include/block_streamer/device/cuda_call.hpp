// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief True for the errors after which the process's context on the device answers nothing else:
/// a kernel or the hardware failed. Only a new process helps.
[[nodiscard]] constexpr bool is_sticky_cuda_error(cudaError_t error) noexcept {
  const int code = static_cast<int>(error);
  switch (code) {
    case 214:  // ECC error that could not be corrected
    case 220:  // NVLink error
    case 226:  // error contained to the device
    case 700:  // illegal address
    case 702:  // launch timeout
    case 710:  // device assertion
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failure
    case 721:  // tensor memory leak
    case 810:  // the MPS client was terminated
    case 911:  // an external device failed
      return true;
    default:
      return false;
  }
}

namespace detail {

/// @brief Turns a failed call into a DeviceError that names call, bytes, device and reason. Clears
/// the runtime's pending error, which would otherwise surface at somebody else's next call.
[[noreturn]] inline void throw_cuda_error(cudaError_t error, std::string_view call, int device,
                                          std::size_t byte_count) {
  (void)cudaGetLastError();
  std::string text = "cuda:" + std::to_string(device) + ": " + std::string{call};
  if (byte_count != 0) text += " of " + std::to_string(byte_count) + " bytes";
  text += std::string{": "} + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  const bool sticky = is_sticky_cuda_error(error);
  if (sticky) text += "; this process can no longer use the device";
  throw DeviceError{text, static_cast<int>(error), sticky};
}

/// @throws DeviceError if `result` is not success.
inline void cuda_call(cudaError_t result, std::string_view call, int device,
                      std::size_t byte_count = 0) {
  if (result != cudaSuccess) throw_cuda_error(result, call, device, byte_count);
}

/// @brief Makes `device` the calling thread's current one for its own life. Every entry into the
/// runtime needs it: a thread starts on device 0, and a call would make a context there.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) noexcept : device_{device} {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device) error_ = cudaSetDevice(device);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (error_ == cudaSuccess && previous_ != device_) (void)cudaSetDevice(previous_);
  }
  [[nodiscard]] cudaError_t error() const noexcept { return error_; }

 private:
  int device_;
  int previous_ = 0;
  cudaError_t error_ = cudaSuccess;
};

/// @brief Calls the runtime with `device` current. @throws DeviceError if it fails.
template <class Call>
void cuda_on_device(int device, std::string_view name, Call call, std::size_t byte_count = 0) {
  const DeviceGuard guard{device};
  cuda_call(guard.error(), "cudaSetDevice", device);
  cuda_call(call(), name, device, byte_count);
}

/// @brief The same for destructors: a failure (of a lost device, of a runtime that has gone at the
/// program's exit) is dropped and leaves nothing pending.
template <class Call>
void cuda_release(int device, Call call) noexcept {
  const DeviceGuard guard{device};
  if (guard.error() != cudaSuccess || call() != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace detail

/// @brief Number of devices that this process may use; 0 where there is no usable driver.
[[nodiscard]] inline int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

/// @brief Why no device can be used, for a message; nullopt if one can.
[[nodiscard]] inline std::optional<std::string> why_cuda_is_unusable() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return std::nullopt;
  (void)cudaGetLastError();
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  const auto version = [](int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
  };
  if (error == cudaErrorInsufficientDriver && driver == 0) return "no NVIDIA driver was found";
  if (error == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver supports CUDA " + version(driver) + ", this program needs " +
           version(CUDART_VERSION);
  }
  if (error == cudaSuccess || error == cudaErrorNoDevice) {
    return "the NVIDIA driver shows no device";
  }
  return std::string{cudaGetErrorString(error)} + " (" + cudaGetErrorName(error) + ")";
}

}  // namespace block_streamer::inline v1
