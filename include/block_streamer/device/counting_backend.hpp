// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/device/execution_backend.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace block_streamer::inline v1 {

/// Calls so far; each read alone is exact, together they are a snapshot of nothing in particular.
struct CallCounts {
  std::atomic<std::uint64_t> synchronizes{0};
  std::atomic<std::uint64_t> queries{0};
  std::atomic<std::uint64_t> notifies{0};
  std::atomic<std::uint64_t> records{0};
  std::atomic<std::uint64_t> waits{0};
  std::atomic<std::uint64_t> copies{0};
  std::atomic<std::uint64_t> copied_bytes{0};
  std::atomic<std::uint64_t> allocations{0};
  std::atomic<std::uint64_t> allocated_bytes{0};
  std::atomic<std::uint64_t> registrations{0};
  std::atomic<std::uint64_t> registered_bytes{0};
};

/// @brief Decorates a backend with counts of what is asked of it, shared by its copies; everything
/// else, refinements included, is the backend's own. **Cost.** One relaxed addition a call.
template <execution_backend B>
class CountingBackend : public B {
 public:
  using typename B::DeviceBuffer;
  using typename B::Event;
  using typename B::HostRegistration;
  using typename B::Stream;

  explicit CountingBackend(B inner = B{})
      : B{std::move(inner)}, counts_{std::make_shared<CallCounts>()} {}

  [[nodiscard]] const CallCounts& counts() const noexcept { return *counts_; }

  [[nodiscard]] DeviceBuffer allocate_device(std::size_t byte_count) {
    add(counts_->allocations);
    add(counts_->allocated_bytes, byte_count);
    return B::allocate_device(byte_count);
  }
  [[nodiscard]] auto register_host(std::span<std::byte> memory) {
    add(counts_->registrations);
    add(counts_->registered_bytes, memory.size());
    return B::register_host(memory);
  }
  void record(Event& event, Stream& stream) {
    add(counts_->records);
    B::record(event, stream);
  }
  void wait(Stream& stream, Event& event) {
    add(counts_->waits);
    B::wait(stream, event);
  }
  [[nodiscard]] bool query(Event& event) {
    add(counts_->queries);
    return B::query(event);
  }
  void synchronize(Event& event) {
    add(counts_->synchronizes);
    B::synchronize(event);
  }
  void notify(Event& event, IoCompletion reached) {
    add(counts_->notifies);
    B::notify(event, std::move(reached));
  }
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, CopyDirection direction,
                  Stream& stream) {
    add(counts_->copies);
    add(counts_->copied_bytes, to.size());
    B::copy_async(to, from, direction, stream);
  }

 private:
  static void add(std::atomic<std::uint64_t>& counter, std::uint64_t n = 1) noexcept {
    counter.fetch_add(n, std::memory_order_relaxed);
  }
  std::shared_ptr<CallCounts> counts_;
};

}  // namespace block_streamer::inline v1
