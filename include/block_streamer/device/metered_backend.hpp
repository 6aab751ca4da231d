// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/execution_backend.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

namespace block_streamer::inline v1 {

/// What is held of one kind of memory, in bytes.
struct HeldBytes {
  std::uint64_t now = 0;
  std::uint64_t peak = 0;  ///< the most at any time
};

namespace detail {
/// **Threads.** Any.
class ByteMeter {
 public:
  void add(std::uint64_t byte_count) noexcept {
    const std::lock_guard lock{mutex_};
    held_.now += byte_count;
    held_.peak = std::max(held_.peak, held_.now);
  }
  void remove(std::uint64_t byte_count) noexcept {
    const std::lock_guard lock{mutex_};
    held_.now -= byte_count;
  }
  [[nodiscard]] HeldBytes held() const noexcept {
    const std::lock_guard lock{mutex_};
    return held_;
  }

 private:
  mutable std::mutex mutex_;
  HeldBytes held_;
};

/// An owner of memory that counts as held while it lives.
template <class Inner>
class Metered {
 public:
  Metered(Inner inner, std::uint64_t byte_count, std::shared_ptr<ByteMeter> meter)
      : inner_{std::move(inner)}, byte_count_{byte_count}, meter_{std::move(meter)} {
    meter_->add(byte_count_);
  }
  Metered(Metered&&) noexcept = default;
  Metered& operator=(Metered&& other) noexcept {
    if (this != &other) {
      leave();
      inner_ = std::move(other.inner_);
      byte_count_ = other.byte_count_;
      meter_ = std::move(other.meter_);
    }
    return *this;
  }
  ~Metered() { leave(); }
  [[nodiscard]] const Inner& inner() const noexcept { return inner_; }

 private:
  void leave() noexcept {
    if (meter_) meter_->remove(byte_count_);
    meter_.reset();
  }
  Inner inner_;
  std::uint64_t byte_count_;
  std::shared_ptr<ByteMeter> meter_;  // shared: memory may outlive the backend
};
}  // namespace detail

/// @brief Decorates a backend with counts of the bytes that it holds: device memory that it
/// allocated, host memory that it page-locked. For reports. Counts are shared by its copies;
/// everything else, refinements included, is the backend's own.
/// **Cost.** A lock for each of these calls, none for copies and events.
template <execution_backend B>
class MeteredBackend : public B {
 public:
  using typename B::Event;
  using typename B::Stream;
  using DeviceBuffer = detail::Metered<typename B::DeviceBuffer>;
  using HostRegistration = detail::Metered<typename B::HostRegistration>;

  explicit MeteredBackend(B inner = B{}) : B{std::move(inner)} {}

  [[nodiscard]] HeldBytes device_memory() const noexcept { return device_->held(); }
  [[nodiscard]] HeldBytes page_locked_memory() const noexcept { return locked_->held(); }

  [[nodiscard]] DeviceBuffer allocate_device(std::size_t byte_count) {
    return {B::allocate_device(byte_count), byte_count, device_};
  }
  [[nodiscard]] std::span<std::byte> bytes(const DeviceBuffer& buffer) const noexcept {
    return B::bytes(buffer.inner());
  }
  [[nodiscard]] std::optional<HostRegistration> register_host(std::span<std::byte> memory) {
    auto registration = B::register_host(memory);
    if (!registration) return std::nullopt;
    return HostRegistration{std::move(*registration), memory.size(), locked_};
  }

 private:
  std::shared_ptr<detail::ByteMeter> device_ = std::make_shared<detail::ByteMeter>();
  std::shared_ptr<detail::ByteMeter> locked_ = std::make_shared<detail::ByteMeter>();
};

}  // namespace block_streamer::inline v1
