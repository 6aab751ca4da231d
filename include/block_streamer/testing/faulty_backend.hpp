// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/device/execution_backend.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1::testing {

/// @brief Decorates a backend so that one of its calls fails: those that may fail are counted from
/// 0 in the order in which they are made, over all copies of the backend. A call that fails throws
/// DeviceError and does nothing else; `register_host` refuses; `notify` reports an error once the
/// event was passed.
/// **Threads.** As the backend.
template <execution_backend B>
class FaultyBackend : public B {
 public:
  using typename B::DeviceBuffer;
  using typename B::Event;
  using typename B::HostRegistration;
  using typename B::Stream;
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

  explicit FaultyBackend(B inner = B{})
      : B{std::move(inner)}, script_{std::make_shared<Script>()} {}

  /// @brief Call number `n` will fail, no other. @pre not while calls are being made.
  void fail_call(std::uint64_t n) noexcept { script_->fails = n; }
  /// @brief Calls so far.
  [[nodiscard]] std::uint64_t calls() const noexcept { return script_->calls; }

  [[nodiscard]] DeviceBuffer allocate_device(std::size_t byte_count) {
    pass("allocate_device");
    return B::allocate_device(byte_count);
  }
  [[nodiscard]] std::optional<HostRegistration> register_host(std::span<std::byte> memory) {
    if (fails()) return std::nullopt;
    return B::register_host(memory);
  }
  [[nodiscard]] Stream make_stream() {
    pass("make_stream");
    return B::make_stream();
  }
  [[nodiscard]] Event make_event() {
    pass("make_event");
    return B::make_event();
  }
  void record(Event& event, Stream& stream) {
    pass("record");
    B::record(event, stream);
  }
  void wait(Stream& stream, Event& event) {
    pass("wait");
    B::wait(stream, event);
  }
  [[nodiscard]] bool query(Event& event) {
    pass("query");
    return B::query(event);
  }
  void synchronize(Event& event) {
    pass("synchronize");
    B::synchronize(event);
  }
  void notify(Event& event, IoCompletion reached) {
    if (!fails()) return B::notify(event, std::move(reached));
    B::notify(event, [reached = std::move(reached)](std::error_code, std::size_t n) mutable {
      reached(std::make_error_code(std::errc::io_error), n);
    });
  }
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, CopyDirection direction,
                  Stream& stream) {
    pass("copy_async");
    B::copy_async(to, from, direction, stream);
  }

 private:
  struct Script {
    std::atomic<std::uint64_t> calls{0};
    std::atomic<std::uint64_t> fails{never};
  };
  [[nodiscard]] bool fails() noexcept { return script_->calls++ == script_->fails; }
  void pass(const char* call) {
    if (fails()) throw DeviceError{this->name() + ": " + call + " failed", 999};
  }
  std::shared_ptr<Script> script_;
};

}  // namespace block_streamer::inline v1::testing
