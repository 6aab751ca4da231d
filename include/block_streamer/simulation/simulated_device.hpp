// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/simulation/transfer_cost.hpp>
#include <block_streamer/simulation/virtual_clock.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// A device to simulate.
struct DeviceModel {
  TransferCost copy_in;           ///< host to device, and within the device
  TransferCost copy_out;          ///< device to host, at the same time
  bool page_locks = true;         ///< false: register_host is refused
  bool host_addressable = false;  ///< slots are host memory
};

namespace detail {

struct SimulatedStream;

/// A place in a stream: passed once so many of its operations have finished.
struct SimulatedPoint {
  SimulatedStream* stream = nullptr;
  std::uint64_t operations = 0;
};

/// Something that a stream does for a time.
struct SimulatedOperation {
  enum class Engine : std::uint8_t { copy_in, copy_out, compute, wait };
  Engine engine = Engine::wait;
  Nanoseconds duration{};
  PartId part{};
  std::uint64_t byte_count = 0;
  SimulatedPoint awaited{};              ///< wait only
  std::function<void()> begin{}, end{};  ///< what happens to the bytes
};

struct SimulatedStream {
  std::deque<SimulatedOperation> queue;
  bool running = false;  ///< the front is under way, or waits for its engine or event
  std::uint64_t enqueued = 0;
  std::uint64_t finished = 0;
  std::vector<std::pair<std::uint64_t, std::function<void()>>> watchers;

  [[nodiscard]] bool passed(std::uint64_t operations) const noexcept {
    return finished >= operations;
  }
};

/// @brief Streams whose operations take virtual time. A copy engine for each direction carries one
/// copy at a time, in the order in which streams came to it; every stream computes on its own.
/// **Threads.** One.
class SimulatedDevice {
  using Engine = SimulatedOperation::Engine;

 public:
  SimulatedDevice(VirtualClock& clock, DeviceModel device, TraceSinkRef sink)
      : model{device}, clock_{&clock}, trace_{sink} {}
  SimulatedDevice(const SimulatedDevice&) = delete;
  SimulatedDevice& operator=(const SimulatedDevice&) = delete;

  SimulatedStream* add_stream() {
    return streams_.emplace_back(std::make_unique<SimulatedStream>()).get();
  }
  void enqueue(SimulatedStream& stream, SimulatedOperation operation) {
    stream.queue.push_back(std::move(operation));
    ++stream.enqueued;
    advance(stream);
  }
  /// @brief Calls `reached` as a task once the point is passed.
  void watch(SimulatedPoint point, std::function<void()> reached) {
    if (point.stream->passed(point.operations)) return clock_->soon(std::move(reached));
    point.stream->watchers.emplace_back(point.operations,
                                        [this, task = std::move(reached)] { clock_->soon(task); });
  }
  [[nodiscard]] VirtualClock& clock() const noexcept { return *clock_; }

  const DeviceModel model;

 private:
  void advance(SimulatedStream& stream) {
    if (stream.running || stream.queue.empty()) return;
    stream.running = true;
    const SimulatedOperation& next = stream.queue.front();
    switch (next.engine) {
      case Engine::wait:
        if (next.awaited.stream->passed(next.awaited.operations)) return finish(stream);
        next.awaited.stream->watchers.emplace_back(next.awaited.operations,
                                                   [this, &stream] { finish(stream); });
        return;
      case Engine::compute:
        return start(stream, nullptr);
      case Engine::copy_in:
      case Engine::copy_out: {
        Link& link = links_[next.engine == Engine::copy_in ? 0 : 1];
        link.waiting.push_back(&stream);
        return serve(link);
      }
    }
  }

  struct Link {
    bool busy = false;
    std::deque<SimulatedStream*> waiting;
  };
  void serve(Link& link) {
    if (link.busy || link.waiting.empty()) return;
    link.busy = true;
    SimulatedStream* const stream = link.waiting.front();
    link.waiting.pop_front();
    start(*stream, &link);
  }
  void start(SimulatedStream& stream, Link* link) {
    const SimulatedOperation& operation = stream.queue.front();
    if (operation.begin) operation.begin();
    const Nanoseconds begin = clock_->now();
    clock_->after(operation.duration, [this, &stream, link, begin] {
      const SimulatedOperation& ended = stream.queue.front();
      if (ended.end) ended.end();
      record(ended, begin);
      if (link != nullptr) link->busy = false;
      finish(stream);
      if (link != nullptr) serve(*link);
    });
  }
  void finish(SimulatedStream& stream) {
    stream.queue.pop_front();
    ++stream.finished;
    stream.running = false;
    std::vector<std::function<void()>> reached;
    std::erase_if(stream.watchers, [&](auto& watcher) {
      if (!stream.passed(watcher.first)) return false;
      reached.push_back(std::move(watcher.second));
      return true;
    });
    advance(stream);
    for (auto& call : reached) call();
  }
  void record(const SimulatedOperation& operation, Nanoseconds begin) {
    if (!trace_.enabled()) return;
    const bool computes = operation.engine == Engine::compute;
    const Lane lane = computes                              ? Lane::compute
                      : operation.engine == Engine::copy_in ? Lane::copy_in
                                                            : Lane::copy_out;
    trace_.record({computes ? "compute" : "copy", lane, 0, operation.part, begin, clock_->now(),
                   operation.byte_count});
  }

  VirtualClock* clock_;
  TraceSinkRef trace_;
  std::vector<std::unique_ptr<SimulatedStream>> streams_;
  std::array<Link, 2> links_;
};

}  // namespace detail
}  // namespace block_streamer::inline v1
