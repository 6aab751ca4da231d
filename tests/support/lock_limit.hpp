// SPDX-License-Identifier: Apache-2.0
// A device that page-locks no more than a limit, and counts what it has locked.
#pragma once

#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/host_backend.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace support {

struct LockLimit {
  std::uint64_t limit = ~std::uint64_t{0};
  std::uint64_t locked = 0;
  std::uint64_t most = 0;
};

struct LimitedBackend : block_streamer::HostBackend {
  LimitedBackend(block_streamer::HostMode mode, LockLimit& l) : HostBackend{mode}, lock{&l} {}
  class HostRegistration {
   public:
    HostRegistration(LockLimit& lock, std::uint64_t byte_count)
        : lock_{&lock}, byte_count_{byte_count} {
      lock.locked += byte_count;
      lock.most = std::max(lock.most, lock.locked);
    }
    HostRegistration(HostRegistration&& other) noexcept
        : lock_{std::exchange(other.lock_, nullptr)}, byte_count_{other.byte_count_} {}
    HostRegistration& operator=(HostRegistration&& other) noexcept {
      std::swap(lock_, other.lock_);
      std::swap(byte_count_, other.byte_count_);
      return *this;
    }
    ~HostRegistration() {
      if (lock_ != nullptr) lock_->locked -= byte_count_;
    }

   private:
    LockLimit* lock_;
    std::uint64_t byte_count_;
  };
  [[nodiscard]] std::optional<HostRegistration> register_host(std::span<std::byte> memory) {
    if (lock->locked + memory.size() > lock->limit) return std::nullopt;
    return HostRegistration{*lock, memory.size()};
  }
  LockLimit* lock;
};
static_assert(block_streamer::execution_backend<LimitedBackend>);

}  // namespace support
