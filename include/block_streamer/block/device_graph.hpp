// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/host_backend.hpp>

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <string>

namespace block_streamer::inline v1 {

/// @brief How what LibTorch and the pipeline enqueue is recorded in a graph of the device.
/// Specialised per backend; @see device_graph_cuda.hpp.
/// - `supported`: false where devices have no graphs; nothing else is called then.
/// - `Side{backend, device}`: a stream apart, where passes are recorded. `Side::run(work)` calls
/// `work` with it as LibTorch's current one, after what the caller's stream had and before what it
/// gets next.
/// - `record(work)`: records what `work` enqueues, inside Side::run. What it throws passes through,
/// and the device, LibTorch's allocator and its random numbers are as before then.
/// - `RepeatedRandom{device, count}`: random numbers that a recorded pass draws twice, `count`
/// times at most; given to `record(work, &random)` and outlived by the graph's replays. Inside
/// `work` `mark(i)` is where they begin, and they begin there again while what `again(i)` returns
/// lives. `before_replay()` comes before each replay.
/// - `expect_recording()`: inside `work`; throws UnsupportedError if the recording has come to
/// nothing already.
/// - `replay()`: enqueues the graph on LibTorch's current stream.
template <execution_backend Backend>
class DeviceGraph;

namespace detail {
/// Devices without graphs.
class NoDeviceGraph {
 public:
  static constexpr bool supported = false;
  class Side {
   public:
    template <execution_backend Backend>
    Side(const Backend&, at::Device) noexcept {}
    template <class Work>
    void run(Work&& work) {
      work();
    }
  };
  class RepeatedRandom {
   public:
    RepeatedRandom(at::Device, std::size_t) noexcept {}
    void mark(std::size_t) const noexcept {}
    [[nodiscard]] std::shared_ptr<void> again(std::size_t) const noexcept { return nullptr; }
    void before_replay() const noexcept {}
  };
  template <class Work>
  void record(Work&&, RepeatedRandom* = nullptr) {
    throw UnsupportedError{"there are no graphs on this device"};
  }
  void expect_recording() const noexcept {}
  void replay() const noexcept {}
};
}  // namespace detail

template <>
class DeviceGraph<HostBackend> : public detail::NoDeviceGraph {};
template <>
class DeviceGraph<CheckedBackend<HostBackend>> : public detail::NoDeviceGraph {};

}  // namespace block_streamer::inline v1
