// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/device/copy_ranges.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/simulation/simulated_device.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A device in virtual time: real bytes, streams, events and link engines, durations from a
/// DeviceModel. The target of a copy holds poison while the copy runs and its source is read at the
/// end, so whoever looks too early, or refills too early, gets wrong bytes. Records copies and
/// computing, each for the time it really took, in a trace.
/// **Threads.** One. **Lifetime.** The clock's; run it dry before the last handle goes.
class SimulatedBackend {
 public:
  using DeviceBuffer = HostBackend::DeviceBuffer;
  using HostRegistration = HostBackend::HostRegistration;
  static constexpr std::byte poison{0xDE};

  class Stream {
   private:
    friend class SimulatedBackend;
    std::shared_ptr<detail::SimulatedDevice> device_;
    detail::SimulatedStream* queue_ = nullptr;
  };
  class Event {
   private:
    friend class SimulatedBackend;
    std::shared_ptr<detail::SimulatedDevice> device_;
    detail::SimulatedPoint latest_;
  };

  explicit SimulatedBackend(VirtualClock& clock, DeviceModel model = {}, TraceSinkRef trace = {})
      : device_{std::make_shared<detail::SimulatedDevice>(clock, model, trace)} {}

  [[nodiscard]] DeviceBuffer allocate_device(std::size_t byte_count) {
    DeviceBuffer buffer = memory_.allocate_device(byte_count);
    std::ranges::fill(memory_.bytes(buffer), poison);
    return buffer;
  }
  [[nodiscard]] std::span<std::byte> bytes(const DeviceBuffer& buffer) const noexcept {
    return memory_.bytes(buffer);
  }
  [[nodiscard]] std::optional<HostRegistration> register_host(std::span<std::byte>) {
    return device_->model.page_locks ? std::optional{HostRegistration{}} : std::nullopt;
  }
  [[nodiscard]] bool host_addressable() const noexcept { return device_->model.host_addressable; }

  [[nodiscard]] Stream make_stream() {
    Stream stream;
    stream.device_ = device_;
    stream.queue_ = device_->add_stream();
    return stream;
  }
  [[nodiscard]] Event make_event() {
    Event event;
    event.device_ = device_;
    return event;
  }
  void record(Event& event, Stream& stream) {
    event.latest_ = {stream.queue_, stream.queue_->enqueued};
  }
  void wait(Stream& stream, Event& event) {
    detail::SimulatedOperation operation;
    operation.awaited = latest(event);
    device_->enqueue(*stream.queue_, std::move(operation));
  }
  [[nodiscard]] bool query(Event& event) {
    const detail::SimulatedPoint point = latest(event);
    return point.stream->passed(point.operations);
  }
  /// @brief Lets virtual time pass until the device is there.
  void synchronize(Event& event) {
    const detail::SimulatedPoint point = latest(event);
    device_->clock().run_until([&] { return point.stream->passed(point.operations); });
  }
  void notify(Event& event, IoCompletion reached) {
    if (event.latest_.stream == nullptr) {
      return reached(std::make_error_code(std::errc::invalid_argument), 0);
    }
    // std::function copies; the completion is called once all the same.
    device_->watch(event.latest_,
                   [held = std::make_shared<IoCompletion>(std::move(reached))] { (*held)({}, 0); });
  }

  /// @throws ContractViolation if the sizes differ or the ranges overlap.
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, CopyDirection direction,
                  Stream& stream) {
    detail::expects_copyable(to, from);
    if (to.empty()) return;
    const bool out = direction == CopyDirection::device_to_host;
    detail::SimulatedOperation operation;
    operation.engine = out ? Engine::copy_out : Engine::copy_in;
    operation.duration = (out ? device_->model.copy_out : device_->model.copy_in).time(to.size());
    operation.byte_count = to.size();
    operation.begin = [to] { std::ranges::fill(to, poison); };
    operation.end = [to, from] { std::memcpy(to.data(), from.data(), to.size()); };
    device_->enqueue(*stream.queue_, std::move(operation));
  }
  void touch_on_stream(std::span<const std::byte>, Access, Stream&) noexcept {}
  void touch_on_host(std::span<const std::byte>, Access) noexcept {}

  /// @brief The stream computes for `duration`. @param look  called when it begins and when it
  /// ends: what the kernels would read must be there, unchanged, all the time.
  void compute(Stream& stream, PartId part, Nanoseconds duration, std::function<void()> look = {}) {
    detail::SimulatedOperation operation;
    operation.engine = Engine::compute;
    operation.duration = duration;
    operation.part = part;
    operation.begin = look;
    operation.end = std::move(look);
    device_->enqueue(*stream.queue_, std::move(operation));
  }

  [[nodiscard]] Nanoseconds now() const noexcept { return device_->clock().now(); }
  [[nodiscard]] std::string name() const { return "simulated"; }

 private:
  using Engine = detail::SimulatedOperation::Engine;
  static detail::SimulatedPoint latest(const Event& event) {
    expects(event.latest_.stream != nullptr, "the event was never recorded");
    return event.latest_;
  }

  HostBackend memory_;
  std::shared_ptr<detail::SimulatedDevice> device_;
};
static_assert(execution_backend<SimulatedBackend>);

}  // namespace block_streamer::inline v1
