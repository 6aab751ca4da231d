// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/device/copy_ranges.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/host_queue.hpp>
#include <block_streamer/device/notify_thread.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief The processor as a device.
/// *Attached*: the backend of CPU products. Slots are host memory that anyone may dereference;
/// streams run at once on the calling thread, so every record has been passed when it returns, and
/// `notify` calls back before it returns.
/// *Detached*: the shape of a real device, for tests. `host_addressable()` is false, each stream is
/// a thread with a queue, `notify` calls back on one thread of the backend, in the order of the
/// calls. The bytes and the races are real; `pause` holds a stream to provoke them.
/// **Threads.** Everything from any thread, one object at a time included. A handle shared by its
/// copies: the notifying thread must outlive whichever copy goes first, hence the shared_ptr.
/// **Cost.** Attached: no allocation after the make_ calls. Detached: one queue node a call.
/// **Lifetime.** A stream's destructor runs what it holds; one that waits for a paused stream
/// therefore waits for its resume. The last copy of the backend delivers all notifications first.
class HostBackend {
 public:
  /// Memory of the device, 256-aligned, not initialised.
  class DeviceBuffer {
   public:
    DeviceBuffer() noexcept = default;

   private:
    friend class HostBackend;
    struct Release {
      void operator()(std::byte* data) const noexcept {
        ::operator delete (data, std::align_val_t{tensor_alignment});
      }
    };
    std::unique_ptr<std::byte, Release> data_;
    std::size_t byte_count_ = 0;
  };

  /// Nothing to undo: host memory needs no page lock here.
  class HostRegistration {};

  class Stream {
   public:
    Stream(Stream&& other) noexcept = default;
    Stream& operator=(Stream&& other) noexcept {
      if (this != &other) {
        close();
        queue_ = std::move(other.queue_);
      }
      return *this;
    }
    ~Stream() { close(); }

   private:
    friend class HostBackend;
    explicit Stream(std::shared_ptr<detail::HostQueue> queue) : queue_{std::move(queue)} {}
    void close() noexcept {
      if (queue_) queue_->close();
    }
    std::shared_ptr<detail::HostQueue> queue_;
  };

  class Event {
   private:
    friend class HostBackend;
    struct State {
      std::mutex mutex;
      detail::HostPoint latest;
    };
    std::unique_ptr<State> state_ = std::make_unique<State>();
  };

  /// @throws DeviceError if a thread cannot be started (detached).
  explicit HostBackend(HostMode mode = HostMode::attached) : shared_{start<Shared>(mode)} {}

  /// @throws DeviceError if there is not so much memory.
  [[nodiscard]] DeviceBuffer allocate_device(std::size_t byte_count) {
    DeviceBuffer buffer;
    if (byte_count == 0) return buffer;
    // No object may be larger than PTRDIFF_MAX; sanitizers abort on such a request.
    void* const data =
        byte_count > static_cast<std::size_t>(PTRDIFF_MAX)
            ? nullptr
            : ::operator new (byte_count, std::align_val_t{tensor_alignment}, std::nothrow);
    if (data == nullptr) {
      throw DeviceError{name() + ": cannot allocate " + std::to_string(byte_count) + " bytes", 0};
    }
    buffer.data_.reset(static_cast<std::byte*>(data));
    buffer.byte_count_ = byte_count;
    return buffer;
  }
  [[nodiscard]] std::span<std::byte> bytes(const DeviceBuffer& buffer) const noexcept {
    if (!buffer.data_) return {};
    return {buffer.data_.get(), buffer.byte_count_};
  }
  [[nodiscard]] std::optional<HostRegistration> register_host(std::span<std::byte>) {
    return HostRegistration{};
  }
  [[nodiscard]] bool host_addressable() const noexcept { return mode() == HostMode::attached; }
  [[nodiscard]] HostMode mode() const noexcept { return shared_->mode; }

  /// @throws DeviceError if a thread cannot be started (detached).
  [[nodiscard]] Stream make_stream() { return Stream{start<detail::HostQueue>(mode())}; }
  [[nodiscard]] Event make_event() { return {}; }

  void record(Event& event, Stream& stream) {
    detail::HostQueue& queue = queue_of(stream);
    expects(event.state_ != nullptr, "record on a moved-from event");
    const std::lock_guard lock{event.state_->mutex};
    const std::uint64_t ticket = queue.mark();
    event.state_->latest = {stream.queue_, ticket};
  }
  /// @throws ContractViolation if the event was never recorded; so do query and
  /// synchronize, while notify reports std::errc::invalid_argument to `reached`.
  void wait(Stream& stream, Event& event) { queue_of(stream).wait(latest(event)); }
  [[nodiscard]] bool query(Event& event) { return latest(event).passed(); }
  void synchronize(Event& event) { latest(event).block(); }
  void notify(Event& event, IoCompletion reached) {
    detail::HostPoint point = try_latest(event);
    if (!point.queue) return reached(std::make_error_code(std::errc::invalid_argument), 0);
    if (shared_->notifier) return shared_->notifier->post(std::move(point), std::move(reached));
    (void)point.passed();  // orders this thread after the stream's operations
    reached({}, 0);
  }

  /// @throws ContractViolation if the sizes differ or the ranges overlap.
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, CopyDirection,
                  Stream& stream) {
    detail::expects_copyable(to, from);
    detail::HostQueue& queue = queue_of(stream);
    if (to.empty()) return;
    queue.copy(to, from);
  }
  void touch_on_stream(std::span<const std::byte>, Access, Stream&) noexcept {}
  void touch_on_host(std::span<const std::byte>, Access) noexcept {}

  /// @brief Operations enqueued on `stream` after this call do not start before `resume`; earlier
  /// ones go on. For tests. Destroying a paused stream resumes it.
  /// @throws ContractViolation if the backend is attached.
  void pause(Stream& stream) {
    expects(mode() == HostMode::detached, "attached streams run at once and cannot pause");
    queue_of(stream).pause();
  }
  void resume(Stream& stream) { queue_of(stream).resume(); }

  [[nodiscard]] Nanoseconds now() const noexcept {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
  [[nodiscard]] std::string name() const { return "cpu"; }

 private:
  struct Shared {
    explicit Shared(HostMode m) : mode{m} {
      if (m == HostMode::detached) notifier.emplace();
    }
    const HostMode mode;
    std::optional<detail::NotifyThread<detail::HostPoint>> notifier;
  };

  template <class Threaded>
  static std::shared_ptr<Threaded> start(HostMode mode) {
    try {
      return std::make_shared<Threaded>(mode);
    } catch (const std::system_error& error) {
      throw DeviceError{std::string{"cpu: cannot start a thread: "} + error.what(),
                        error.code().value()};
    }
  }

  static detail::HostQueue& queue_of(Stream& stream) {
    expects(stream.queue_ != nullptr, "use of a moved-from stream");
    return *stream.queue_;
  }

  static detail::HostPoint try_latest(Event& event) {
    if (!event.state_) return {};  // moved from
    const std::lock_guard lock{event.state_->mutex};
    return event.state_->latest;
  }
  static detail::HostPoint latest(Event& event) {
    detail::HostPoint point = try_latest(event);
    expects(point.queue != nullptr, "the event was never recorded");
    return point;
  }

  std::shared_ptr<Shared> shared_;
};
static_assert(execution_backend<HostBackend>);

}  // namespace block_streamer::inline v1
