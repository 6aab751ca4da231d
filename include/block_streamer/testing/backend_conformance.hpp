// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/testing/conformance.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::testing {

struct BackendSuiteOptions {
  bool enqueues_from_threads = true;  ///< false for backends that live on one thread altogether
  /// How long a notification may take before it counts as lost.
  std::chrono::seconds patience{60};
  /// For backends in virtual time: lets something happen; false if nothing can.
  std::function<bool()> progress{};
};

namespace detail {

/// Counts completions, and keeps the error of the last.
class Tally {
 public:
  [[nodiscard]] IoCompletion completion() {
    return [state = state_](std::error_code error, std::size_t) {
      const std::scoped_lock lock{state->mutex};
      ++state->count;
      state->last = error;
      state->changed.notify_all();
    };
  }
  [[nodiscard]] bool wait_for(std::size_t count, const BackendSuiteOptions& options) {
    while (options.progress && this->count() < count && options.progress()) {
    }
    std::unique_lock lock{state_->mutex};
    if (options.progress) return state_->count >= count;
    return state_->changed.wait_for(lock, options.patience, [&] { return state_->count >= count; });
  }
  [[nodiscard]] std::size_t count() const {
    const std::scoped_lock lock{state_->mutex};
    return state_->count;
  }
  [[nodiscard]] std::error_code last() const {
    const std::scoped_lock lock{state_->mutex};
    return state_->last;
  }

 private:
  struct State {
    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
    std::size_t count = 0;
    std::error_code last;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// The suite's steps over one backend.
template <execution_backend Backend>
class BackendSuite {
  using Stream = typename Backend::Stream;
  using Event = typename Backend::Event;
  using Bytes = std::vector<std::byte>;

 public:
  BackendSuite(Backend backend, Report report, BackendSuiteOptions options)
      : backend_{std::move(backend)},
        checks_{std::move(report)},
        options_{std::move(options)},
        stream_{backend_.make_stream()} {}

  Conformance run() {
    check_memory();
    check_copies();
    check_emptiness();
    check_moves();
    check_unrecorded();
    check_waits();
    check_events_outlive_streams();
    check_notifications();
    if (options_.enqueues_from_threads) check_threads();
    return checks_.result();
  }

 private:
  /// Registered host memory.
  struct Pinned {
    Pinned(Backend& backend, Bytes content)
        : bytes{std::move(content)}, registration{backend.register_host(bytes)} {}
    Bytes bytes;
    std::optional<typename Backend::HostRegistration> registration;
  };
  static Bytes pattern(std::size_t byte_count, std::uint32_t seed) {
    Bytes bytes(byte_count);
    std::uint32_t state = seed * 2654435761U + 1;
    for (std::byte& b : bytes) {
      state = state * 1664525U + 1013904223U;
      b = static_cast<std::byte>(state >> 24U);
    }
    return bytes;
  }
  Bytes download(std::span<const std::byte> device, Stream& stream) {
    Pinned host{backend_, Bytes(device.size())};
    Event event = backend_.make_event();
    backend_.copy_async(host.bytes, device, CopyDirection::device_to_host, stream);
    backend_.record(event, stream);
    backend_.synchronize(event);
    backend_.touch_on_host(host.bytes, Access::read);
    return host.bytes;
  }
  void upload(std::span<std::byte> device, const Pinned& host, Stream& stream) {
    backend_.copy_async(device, host.bytes, CopyDirection::host_to_device, stream);
  }
  /// True if `call` is refused as a caller's bug.
  template <class Call>
  static bool refused(Call&& call) {
    try {
      call();
    } catch (const ContractViolation&) {
      return true;
    }
    return false;
  }

  void check_memory() {
    for (const std::size_t n : {std::size_t{1}, std::size_t{257}, std::size_t{1} << 20U}) {
      const auto buffer = backend_.allocate_device(n);
      const auto bytes = backend_.bytes(buffer);
      checks_.expect(bytes.size() == n, "a buffer has the size that was asked for", "");
      checks_.expect(reinterpret_cast<std::uintptr_t>(bytes.data()) % tensor_alignment == 0,
                     "a buffer is aligned for tensors", [&] { return std::to_string(n); });
    }
    const auto none = backend_.allocate_device(0);
    checks_.expect(backend_.bytes(none).empty(), "no bytes are an empty buffer", "");
    checks_.expect(!backend_.name().empty(), "a backend has a name", "");
    const Nanoseconds before = backend_.now();
    checks_.expect(backend_.now() >= before, "the clock does not run backwards", "");
  }
  void check_copies() {
    for (const std::size_t n : {1U, 3U, 255U, 4097U, 65537U}) {
      const auto buffer = backend_.allocate_device(n + 20);
      const auto second = backend_.allocate_device(n + 20);
      Pinned background{backend_, pattern(n + 20, 1)};
      Pinned source{backend_, pattern(n + 7, 2)};
      upload(backend_.bytes(buffer), background, stream_);
      backend_.copy_async(backend_.bytes(buffer).subspan(13, n), std::span{source.bytes}.subspan(7),
                          CopyDirection::host_to_device, stream_);
      backend_.copy_async(backend_.bytes(second), backend_.bytes(buffer),
                          CopyDirection::device_to_device, stream_);
      upload(backend_.bytes(buffer), background, stream_);
      Bytes expected = background.bytes;
      std::copy(source.bytes.begin() + 7, source.bytes.end(), expected.begin() + 13);
      checks_.expect(download(backend_.bytes(second), stream_) == expected,
                     "copies of a stream happen in order, to the byte",
                     [&] { return std::to_string(n) + " bytes"; });
    }
    const auto buffer = backend_.allocate_device(8);
    Pinned source{backend_, pattern(9, 1)};
    checks_.expect(refused([&] { upload(backend_.bytes(buffer), source, stream_); }),
                   "a copy whose sides differ in size is a ContractViolation", "it was accepted");
  }
  void check_emptiness() {
    checks_.expect(backend_.register_host({}).has_value(), "no bytes can be registered", "");
    backend_.copy_async({}, {}, CopyDirection::host_to_device, stream_);
    backend_.touch_on_stream({}, Access::write, stream_);
    backend_.touch_on_host({}, Access::write);
    Event event = backend_.make_event();
    backend_.record(event, stream_);
    backend_.synchronize(event);
    checks_.expect(backend_.query(event), "an event that was waited for is passed", "");
  }
  void check_moves() {
    auto first = backend_.allocate_device(301);
    Pinned source{backend_, pattern(301, 5)};
    Stream stream = backend_.make_stream();
    upload(backend_.bytes(first), source, stream);
    auto second = std::move(first);
    Stream moved = std::move(stream);
    checks_.expect(download(backend_.bytes(second), moved) == source.bytes,
                   "buffers and streams keep what they have when they move", "");
    stream = std::move(moved);
    auto third = backend_.allocate_device(1);
    third = std::move(second);
    checks_.expect(download(backend_.bytes(third), stream) == source.bytes,
                   "buffers and streams can be assigned", "");
  }
  void check_unrecorded() {
    Event event = backend_.make_event();
    checks_.expect(refused([&] { backend_.wait(stream_, event); }) &&
                       refused([&] { (void)backend_.query(event); }) &&
                       refused([&] { backend_.synchronize(event); }),
                   "an event that was never recorded is a ContractViolation", "it was accepted");
    Tally tally;
    backend_.notify(event, tally.completion());
    checks_.expect(tally.wait_for(1, options_) && tally.last() == std::errc::invalid_argument,
                   "notify reports invalid_argument for an event that was never recorded",
                   [&] { return tally.last().message(); });
  }
  void check_waits() {
    constexpr std::size_t n = 30011;
    const auto a = backend_.allocate_device(n), b = backend_.allocate_device(n);
    Stream other = backend_.make_stream();
    Event one = backend_.make_event(), two = backend_.make_event();
    bool right = true, passed = true;
    for (std::uint32_t round = 0; round < 30; ++round) {
      Pinned source{backend_, pattern(n, round)};
      upload(backend_.bytes(a), source, stream_);
      backend_.record(one, stream_);
      backend_.wait(other, one);
      backend_.copy_async(backend_.bytes(b), backend_.bytes(a), CopyDirection::device_to_device,
                          other);
      backend_.record(two, other);
      backend_.wait(stream_, two);  // the next round overwrites what was read
      backend_.synchronize(two);
      passed = passed && backend_.query(one) && backend_.query(two);
      right = right && download(backend_.bytes(b), other) == source.bytes;
    }
    checks_.expect(right, "a wait orders one stream after another", "");
    checks_.expect(passed, "what an awaited event waits for is passed", "");
  }
  void check_events_outlive_streams() {
    const auto buffer = backend_.allocate_device(777);
    Pinned source{backend_, pattern(777, 3)};
    Event event = backend_.make_event();
    {
      Stream gone = backend_.make_stream();
      upload(backend_.bytes(buffer), source, gone);
      backend_.record(event, gone);
    }
    backend_.wait(stream_, event);
    checks_.expect(download(backend_.bytes(buffer), stream_) == source.bytes,
                   "an event and its work outlive the stream", "");
  }
  void check_notifications() {
    Tally tally;
    {
      Event event = backend_.make_event();
      backend_.record(event, stream_);
      for (int i = 0; i < 20; ++i) backend_.notify(event, tally.completion());
    }
    checks_.expect(tally.wait_for(20, options_) && !tally.last(),
                   "every notification comes, without an error, also if the event has gone",
                   [&] { return std::to_string(tally.count()) + " of 20"; });
    Event outer = backend_.make_event(), inner = backend_.make_event();
    Tally nested;
    backend_.record(outer, stream_);
    backend_.notify(outer, [&, done = nested.completion()](std::error_code, std::size_t) mutable {
      backend_.record(inner, stream_);
      backend_.notify(inner, std::move(done));
    });
    checks_.expect(nested.wait_for(1, options_), "a notification may use the backend", "");
    backend_.synchronize(inner);
    checks_.expect(tally.count() == 20 && nested.count() == 1, "a notification comes once", "");
  }
  void check_threads() {
    constexpr std::size_t piece = 1031, count = 200;
    const auto buffer = backend_.allocate_device(piece * count);
    Pinned source{backend_, pattern(piece * count, 9)};
    const auto enqueue = [&](std::size_t parity) {
      Stream own = backend_.make_stream();
      Event event = backend_.make_event();
      for (std::size_t i = parity; i < count; i += 2) {
        backend_.copy_async(backend_.bytes(buffer).subspan(i * piece, piece),
                            std::span{source.bytes}.subspan(i * piece, piece),
                            CopyDirection::host_to_device, i % 3 == 0 ? own : stream_);
      }
      backend_.record(event, own);
      backend_.wait(stream_, event);
    };
    std::thread other{enqueue, std::size_t{1}};
    enqueue(0);
    other.join();
    checks_.expect(download(backend_.bytes(buffer), stream_) == source.bytes,
                   "two threads may enqueue at once, on one stream and on their own", "");
  }

  Backend backend_;
  Checks checks_;
  BackendSuiteOptions options_;
  Stream stream_;
};

}  // namespace detail

/// @brief Checks that a backend keeps the promises of execution_backend, as far as they show
/// without holding its streams back.
/// **Threads.** The caller's, one more, and the backend's own.
template <execution_backend Backend>
Conformance check_execution_backend(Backend backend, Report report,
                                    BackendSuiteOptions options = {}) {
  return detail::BackendSuite<Backend>{std::move(backend), std::move(report), std::move(options)}
      .run();
}

}  // namespace block_streamer::inline v1::testing
