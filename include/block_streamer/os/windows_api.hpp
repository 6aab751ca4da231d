// SPDX-License-Identifier: Apache-2.0
#pragma once

#if !defined(_WIN32)
#error "block_streamer/os/windows_api.hpp: this header exists for Windows only"
#endif

// Without these, windows.h defines min and max and brings a socket interface that Asio refuses.
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>

#include <system_error>
#include <utility>

namespace block_streamer::inline v1::detail {

[[nodiscard]] inline std::error_code windows_error(DWORD code) noexcept {
  return {static_cast<int>(code), std::system_category()};
}
[[nodiscard]] inline std::error_code last_system_error() noexcept {
  return windows_error(::GetLastError());
}

/// A kernel object, closed at the end. Empty: nullptr, also where the system says
/// INVALID_HANDLE_VALUE.
class WindowsHandle {
 public:
  WindowsHandle() noexcept = default;
  explicit WindowsHandle(HANDLE value) noexcept
      : value_{value == INVALID_HANDLE_VALUE ? nullptr : value} {}
  WindowsHandle(WindowsHandle&& other) noexcept : value_{std::exchange(other.value_, nullptr)} {}
  WindowsHandle& operator=(WindowsHandle&& other) noexcept {
    if (this != &other) {
      close();
      value_ = std::exchange(other.value_, nullptr);
    }
    return *this;
  }
  WindowsHandle(const WindowsHandle&) = delete;
  WindowsHandle& operator=(const WindowsHandle&) = delete;
  ~WindowsHandle() { close(); }

  [[nodiscard]] HANDLE get() const noexcept { return value_; }
  explicit operator bool() const noexcept { return value_ != nullptr; }
  /// @returns what the system says about closing; true if there was nothing to close.
  bool close() noexcept {
    return value_ == nullptr || ::CloseHandle(std::exchange(value_, nullptr)) != 0;
  }

 private:
  HANDLE value_ = nullptr;
};

}  // namespace block_streamer::inline v1::detail
