// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/host_backend.hpp>

#include <c10/core/Device.h>

namespace block_streamer::inline v1 {

/// @brief How a backend and LibTorch share a device: which LibTorch device it is, and which of its
/// streams LibTorch's kernels run on in the calling thread. Specialised per backend; @see
/// stream_bridge_cuda.hpp.
/// - `computes_on_host`: kernels run on the calling thread, so a visit waits on the host until its
/// bytes are there.
/// - `device()`: the LibTorch device of slots and activations.
/// - `current()`: the stream for a pass that begins now; valid until the next call.
template <execution_backend Backend>
class StreamBridge;

namespace detail {
/// Backends whose device is the processor: LibTorch's kernels run on the calling thread.
template <execution_backend Backend>
class HostBridge {
 public:
  static constexpr bool computes_on_host = true;
  explicit HostBridge(Backend& backend) : stream_{backend.make_stream()} {}
  [[nodiscard]] at::Device device() const { return at::Device{at::kCPU}; }
  /// A stream of its own: kernels run on the caller, it only carries the order of releases.
  [[nodiscard]] typename Backend::Stream& current() noexcept { return stream_; }

 private:
  typename Backend::Stream stream_;
};
}  // namespace detail

template <>
class StreamBridge<HostBackend> : public detail::HostBridge<HostBackend> {
 public:
  using HostBridge::HostBridge;
};
template <>
class StreamBridge<CheckedBackend<HostBackend>>
    : public detail::HostBridge<CheckedBackend<HostBackend>> {
 public:
  using HostBridge::HostBridge;
};

}  // namespace block_streamer::inline v1
