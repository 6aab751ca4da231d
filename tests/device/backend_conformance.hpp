// SPDX-License-Identifier: Apache-2.0
// What every execution_backend must do, run over each model from a TEST_CASE:
//   backend_conformance([] { return HostBackend{HostMode::detached}; }, holder);
// `Holder` keeps a stream from starting what is enqueued next (`hold`, `release`), where the model
// can: without it the sections about "not yet" do not run.
#pragma once

#include <block_streamer/device/execution_backend.hpp>

#include <support/catch.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace conformance {

namespace bs = block_streamer;
using bs::CopyDirection;

/// A value for each byte that depends on its offset and on `seed`.
inline std::vector<std::byte> pattern(std::size_t byte_count, unsigned seed) {
  std::vector<std::byte> bytes(byte_count);
  std::uint32_t state = seed * 2654435761U + 1;
  for (std::byte& b : bytes) {
    state = state * 1664525U + 1013904223U;
    b = static_cast<std::byte>(state >> 24U);
  }
  return bytes;
}

/// Counts completions; `wait_for(n)` blocks until n of them came.
class Tally {
 public:
  void add(std::error_code error) {
    const std::lock_guard lock{mutex_};
    ++count_;
    last_ = error;
    changed_.notify_all();
  }
  void wait_for(int count) {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return count_ >= count; });
  }
  int count() {
    const std::lock_guard lock{mutex_};
    return count_;
  }
  std::error_code last() {
    const std::lock_guard lock{mutex_};
    return last_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
  std::error_code last_;
};

/// For models whose streams cannot be held.
struct NoHolder {
  static constexpr bool can_hold = false;
  template <class Backend>
  void hold(Backend&, typename Backend::Stream&) {}
  template <class Backend>
  void release(Backend&, typename Backend::Stream&) {}
};

/// For models with `pause` and `resume`.
struct PauseHolder {
  static constexpr bool can_hold = true;
  template <class Backend>
  void hold(Backend& backend, typename Backend::Stream& stream) {
    backend.pause(stream);
  }
  template <class Backend>
  void release(Backend& backend, typename Backend::Stream& stream) {
    backend.resume(stream);
  }
};

/// Registered host memory.
template <class Backend>
struct Pinned {
  Pinned(Backend& backend, std::vector<std::byte> content)
      : bytes{std::move(content)}, registration{backend.register_host(bytes)} {
    REQUIRE(registration.has_value());
  }
  std::vector<std::byte> bytes;
  std::optional<typename Backend::HostRegistration> registration;
};

template <class Backend>
std::vector<std::byte> download(Backend& backend, std::span<const std::byte> device,
                                typename Backend::Stream& stream) {
  Pinned<Backend> host{backend, std::vector<std::byte>(device.size())};
  auto event = backend.make_event();
  backend.copy_async(host.bytes, device, CopyDirection::device_to_host, stream);
  backend.record(event, stream);
  backend.synchronize(event);
  backend.touch_on_host(host.bytes, bs::Access::read);
  return host.bytes;
}

template <class Backend>
void memory_sections(Backend& backend) {
  auto stream = backend.make_stream();
  SECTION("memory is aligned, and no bytes have no address") {
    for (const std::size_t n : {std::size_t{1}, std::size_t{257}, std::size_t{1} << 20U}) {
      const auto buffer = backend.allocate_device(n);
      REQUIRE(backend.bytes(buffer).size() == n);
      CHECK(reinterpret_cast<std::uintptr_t>(backend.bytes(buffer).data()) % 256 == 0);
    }
    const auto empty = backend.allocate_device(0);
    CHECK(backend.bytes(empty).data() == nullptr);
    CHECK(backend.bytes(empty).empty());
  }
  SECTION("copies of odd sizes at odd offsets move these bytes and no others") {
    for (const std::size_t n : {1U, 3U, 255U, 4097U, 65537U}) {
      const auto buffer = backend.allocate_device(n + 20);
      Pinned<Backend> background{backend, pattern(n + 20, 1)};
      Pinned<Backend> source{backend, pattern(n + 7, 2)};
      backend.copy_async(backend.bytes(buffer), background.bytes, CopyDirection::host_to_device,
                         stream);
      backend.copy_async(backend.bytes(buffer).subspan(13, n), std::span{source.bytes}.subspan(7),
                         CopyDirection::host_to_device, stream);
      auto expected = background.bytes;
      std::copy(source.bytes.begin() + 7, source.bytes.end(), expected.begin() + 13);
      CHECK(download(backend, backend.bytes(buffer), stream) == expected);
    }
  }
  SECTION("no bytes may be copied and registered") {
    CHECK(backend.register_host({}).has_value());
    backend.copy_async({}, {}, CopyDirection::host_to_device, stream);
    backend.touch_on_stream({}, bs::Access::write, stream);
    backend.touch_on_host({}, bs::Access::write);
    auto event = backend.make_event();
    backend.record(event, stream);
    backend.synchronize(event);
    CHECK(backend.query(event));
  }
  SECTION("a copy whose sides differ in size is refused") {
    const auto buffer = backend.allocate_device(8);
    Pinned<Backend> source{backend, pattern(9, 1)};
    CHECK_THROWS_AS(backend.copy_async(backend.bytes(buffer), source.bytes,
                                       CopyDirection::host_to_device, stream),
                    bs::ContractViolation);
  }
  SECTION("a moved buffer keeps its bytes") {
    auto first = backend.allocate_device(301);
    Pinned<Backend> source{backend, pattern(301, 5)};
    backend.copy_async(backend.bytes(first), source.bytes, CopyDirection::host_to_device, stream);
    auto second = std::move(first);
    auto third = backend.allocate_device(1);
    third = std::move(second);
    CHECK(download(backend, backend.bytes(third), stream) == source.bytes);
  }
  SECTION("it has a name and a clock that does not run backwards") {
    CHECK_FALSE(backend.name().empty());
    const auto before = backend.now();
    CHECK(backend.now() >= before);
  }
}

template <class Backend>
void order_sections(Backend& backend) {
  auto stream = backend.make_stream();
  SECTION("a stream keeps the order of its operations") {
    constexpr std::size_t n = 9001;
    const auto a = backend.allocate_device(n);
    const auto b = backend.allocate_device(n);
    Pinned<Backend> last{backend, pattern(n, 0)};
    for (unsigned i = 1; i < 6; ++i) {
      Pinned<Backend> source{backend, pattern(n, i)};
      backend.copy_async(backend.bytes(a), source.bytes, CopyDirection::host_to_device, stream);
      backend.copy_async(backend.bytes(b), backend.bytes(a), CopyDirection::device_to_device,
                         stream);
      CHECK(download(backend, backend.bytes(b), stream) == source.bytes);
      backend.copy_async(backend.bytes(a), last.bytes, CopyDirection::host_to_device, stream);
    }
    CHECK(download(backend, backend.bytes(a), stream) == last.bytes);
  }
  SECTION("an event that was never recorded cannot be waited for") {
    auto event = backend.make_event();
    CHECK_THROWS_AS(backend.wait(stream, event), bs::ContractViolation);
    CHECK_THROWS_AS(backend.query(event), bs::ContractViolation);
    CHECK_THROWS_AS(backend.synchronize(event), bs::ContractViolation);
    Tally tally;
    backend.notify(event, [&](std::error_code error, std::size_t) { tally.add(error); });
    tally.wait_for(1);
    CHECK(tally.last() == std::errc::invalid_argument);
  }
  SECTION("an event and its bytes outlive the stream") {
    constexpr std::size_t n = 777;
    const auto buffer = backend.allocate_device(n);
    Pinned<Backend> source{backend, pattern(n, 3)};
    auto event = backend.make_event();
    {
      auto gone = backend.make_stream();
      backend.copy_async(backend.bytes(buffer), source.bytes, CopyDirection::host_to_device, gone);
      backend.record(event, gone);
    }
    backend.wait(stream, event);
    CHECK(download(backend, backend.bytes(buffer), stream) == source.bytes);
    backend.synchronize(event);
    CHECK(backend.query(event));
  }
  SECTION("streams and events move, and a stream waits for an event of its own") {
    constexpr std::size_t n = 1234;
    const auto buffer = backend.allocate_device(n);
    Pinned<Backend> source{backend, pattern(n, 4)};
    auto moved = std::move(stream);
    auto event = backend.make_event();
    backend.copy_async(backend.bytes(buffer), source.bytes, CopyDirection::host_to_device, moved);
    backend.record(event, moved);
    auto moved_event = std::move(event);
    backend.wait(moved, moved_event);
    CHECK(download(backend, backend.bytes(buffer), moved) == source.bytes);
    moved = backend.make_stream();  // the old one runs out first
    backend.wait(moved, moved_event);
    CHECK(download(backend, backend.bytes(buffer), moved) == source.bytes);
    stream = std::move(moved);
  }
  SECTION("many events on one stream all pass") {
    std::vector<typename Backend::Event> events;
    for (int i = 0; i < 1000; ++i) {
      events.push_back(backend.make_event());
      backend.record(events.back(), stream);
    }
    backend.synchronize(events.back());
    for (auto& event : events) CHECK(backend.query(event));
  }
}

template <class Backend>
void thread_sections(Backend& backend) {
  SECTION("two threads enqueue at once, on one stream and on their own") {
    constexpr std::size_t piece = 1031;
    constexpr unsigned count = 100;
    const auto buffer = backend.allocate_device(piece * count * 2);
    Pinned<Backend> source{backend, pattern(piece * count * 2, 9)};
    auto shared = backend.make_stream();
    auto enqueue = [&](unsigned parity) {
      auto own = backend.make_stream();
      auto event = backend.make_event();
      for (unsigned i = parity; i < 2 * count; i += 2) {
        auto& stream = i % 3 == 0 ? own : shared;
        backend.copy_async(backend.bytes(buffer).subspan(i * piece, piece),
                           std::span{source.bytes}.subspan(i * piece, piece),
                           CopyDirection::host_to_device, stream);
      }
      backend.record(event, own);
      backend.wait(shared, event);
    };
    std::thread other{enqueue, 1U};
    enqueue(0);
    other.join();
    CHECK(download(backend, backend.bytes(buffer), shared) == source.bytes);
  }
}

template <class Backend>
void notify_sections(Backend& backend) {
  auto stream = backend.make_stream();
  SECTION("notify reports once, without an error, and may use the backend") {
    auto event = backend.make_event();
    auto next = backend.make_event();
    Tally tally;
    backend.record(event, stream);
    backend.notify(event, [&](std::error_code error, std::size_t) {
      backend.record(next, stream);
      backend.notify(next, [&](std::error_code e, std::size_t) { tally.add(e); });
      tally.add(error);
    });
    tally.wait_for(2);
    CHECK_FALSE(tally.last());
    backend.synchronize(next);
    CHECK(tally.count() == 2);
  }
  SECTION("one event carries several notifications") {
    auto event = backend.make_event();
    Tally tally;
    backend.record(event, stream);
    for (int i = 0; i < 20; ++i) {
      backend.notify(event, [&](std::error_code error, std::size_t) { tally.add(error); });
    }
    tally.wait_for(20);
    CHECK(tally.count() == 20);
  }
  SECTION("an event may go while it is being waited for") {
    Tally tally;
    {
      auto event = backend.make_event();
      backend.record(event, stream);
      backend.notify(event, [&](std::error_code error, std::size_t) { tally.add(error); });
    }
    tally.wait_for(1);
    CHECK_FALSE(tally.last());
  }
}

template <class Backend, class Holder>
void wait_sections(Backend& backend, Holder& holder) {
  auto first = backend.make_stream();
  auto second = backend.make_stream();
  auto one = backend.make_event();
  auto two = backend.make_event();
  SECTION("a wait orders one stream after another") {
    constexpr std::size_t n = 30011;
    const auto a = backend.allocate_device(n);
    const auto b = backend.allocate_device(n);
    auto bystander = backend.make_stream();
    auto three = backend.make_event();
    for (unsigned round = 0; round < 30; ++round) {
      Pinned<Backend> source{backend, pattern(n, round)};
      holder.hold(backend, first);
      backend.copy_async(backend.bytes(a), source.bytes, CopyDirection::host_to_device, first);
      backend.record(one, first);
      backend.wait(second, one);
      backend.copy_async(backend.bytes(b), backend.bytes(a), CopyDirection::device_to_device,
                         second);
      backend.record(two, second);
      if (Holder::can_hold) {
        backend.record(three, bystander);  // time enough for `second` to run ahead, if it could
        backend.synchronize(three);
        CHECK_FALSE(backend.query(one));
        CHECK_FALSE(backend.query(two));
      }
      holder.release(backend, first);
      backend.synchronize(two);
      CHECK(backend.query(one));
      CHECK(backend.query(two));
      CHECK(download(backend, backend.bytes(b), second) == source.bytes);
    }
  }
  if constexpr (Holder::can_hold) {
    SECTION("who waits for a record does not wait for the next one") {
      Tally tally;
      backend.record(one, first);
      backend.wait(second, one);
      backend.notify(one, [&](std::error_code error, std::size_t) { tally.add(error); });
      holder.hold(backend, first);
      backend.record(one, first);
      backend.record(two, second);
      backend.synchronize(two);
      tally.wait_for(1);
      CHECK_FALSE(backend.query(one));
      holder.release(backend, first);
      backend.synchronize(one);
      CHECK(backend.query(one));
    }
    SECTION("notify keeps silent until the record was passed, and keeps its order") {
      std::mutex mutex;
      std::vector<int> order;
      Tally tally;
      holder.hold(backend, first);
      backend.record(one, first);
      backend.record(two, first);
      auto note = [&](int number) {
        return [&, number](std::error_code error, std::size_t) {
          {
            const std::lock_guard lock{mutex};
            order.push_back(number);
          }
          tally.add(error);
        };
      };
      backend.notify(one, note(1));
      backend.notify(two, note(2));
      backend.notify(one, note(3));
      CHECK(tally.count() == 0);
      holder.release(backend, first);
      tally.wait_for(3);
      const std::lock_guard lock{mutex};
      CHECK(order == std::vector<int>{1, 2, 3});
    }
  }
}

template <class Make, class Holder>
void lifetime_sections(Make& make, Holder& holder) {
  SECTION("the last handle delivers what was asked of it") {
    Tally tally;
    Tally leaving;
    {
      auto backend = make();
      auto event = backend.make_event();
      {
        auto stream = backend.make_stream();
        holder.hold(backend, stream);
        backend.record(event, stream);
        for (int i = 0; i < 1000; ++i) {
          backend.notify(event, [&](std::error_code error, std::size_t) {
            if (Holder::can_hold) leaving.wait_for(1);  // the others are left to the destructor
            tally.add(error);
          });
        }
        holder.release(backend, stream);
      }
      leaving.add({});
    }
    CHECK(tally.count() == 1000);
  }
  if constexpr (Holder::can_hold) {
    SECTION("a completion may drop the last handle, and those behind it still come") {
      Tally tally;
      Tally dropped;
      {
        auto backend = std::make_optional(make());
        auto stream = backend->make_stream();
        auto event = backend->make_event();
        backend->record(event, stream);
        backend->notify(event, [&, keep = *backend](std::error_code error, std::size_t) mutable {
          dropped.wait_for(1);
          const auto last = std::move(keep);
          tally.add(error);
        });
        for (int i = 0; i < 100; ++i) {
          backend->notify(event, [&](std::error_code error, std::size_t) { tally.add(error); });
        }
        backend.reset();
        dropped.add({});
        tally.wait_for(101);
      }
      CHECK(tally.count() == 101);
      CHECK_FALSE(tally.last());
    }
  }
}

template <class Make, class Holder = NoHolder>
void backend_conformance(Make make, Holder holder = {}) {
  auto backend = make();
  memory_sections(backend);
  order_sections(backend);
  thread_sections(backend);
  notify_sections(backend);
  wait_sections(backend, holder);
  lifetime_sections(make, holder);
}

}  // namespace conformance
