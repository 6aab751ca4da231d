// SPDX-License-Identifier: Apache-2.0
// Counts what LibTorch allocates for tensors in host memory: the "device" of a detached backend.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace support {

/// LibTorch's allocator, with a count of the bytes that live of allocations of some size.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator(c10::Allocator& inner, std::uint64_t smallest)
      : inner_{inner}, smallest_{smallest} {}

  c10::DataPtr allocate(std::size_t byte_count) override {
    c10::DataPtr memory = inner_.allocate(byte_count);
    if (byte_count < smallest_) return memory;
    add(byte_count);
    void* const data = memory.get();
    const c10::Device device = memory.device();
    return {data, new Held{std::move(memory), byte_count, this}, &CountingAllocator::release,
            device};
  }
  void copy_data(void* to, const void* from, std::size_t byte_count) const override {
    std::memcpy(to, from, byte_count);
  }
  [[nodiscard]] std::uint64_t peak() const {
    const std::lock_guard lock{mutex_};
    return peak_;
  }

 private:
  struct Held {
    c10::DataPtr memory;
    std::size_t byte_count;
    CountingAllocator* owner;
  };
  static void release(void* held) {
    auto* const memory = static_cast<Held*>(held);
    {
      const std::lock_guard lock{memory->owner->mutex_};
      memory->owner->live_ -= memory->byte_count;
    }
    delete memory;
  }
  void add(std::size_t byte_count) {
    const std::lock_guard lock{mutex_};
    live_ += byte_count;
    peak_ = std::max(peak_, live_);
  }

  c10::Allocator& inner_;
  std::uint64_t smallest_;
  mutable std::mutex mutex_;
  std::uint64_t live_ = 0, peak_ = 0;
};

/// The most bytes of tensors of at least `smallest` bytes that lived at once while it does.
class DeviceMeter {
 public:
  explicit DeviceMeter(std::uint64_t smallest)
      : inner_{c10::GetCPUAllocator()}, allocator_{new CountingAllocator{*inner_, smallest}} {
    c10::SetCPUAllocator(allocator_);
  }
  DeviceMeter(const DeviceMeter&) = delete;
  DeviceMeter& operator=(const DeviceMeter&) = delete;
  ~DeviceMeter() { c10::SetCPUAllocator(inner_); }  // the counter stays: tensors may outlive this
  [[nodiscard]] std::uint64_t peak() const { return allocator_->peak(); }

 private:
  c10::Allocator* inner_;
  CountingAllocator* allocator_;
};

}  // namespace support
