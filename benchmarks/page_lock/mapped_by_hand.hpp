// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

namespace block_streamer_benchmarks {

/// @brief The shortest way to memory that is cheap to page-lock; knows nothing of the library.
class MappedByHand {
 public:
  explicit MappedByHand(std::size_t byte_count) : reserved_{byte_count + huge_page} {
    start_ = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start_ == MAP_FAILED) throw std::bad_alloc{};
    auto* const first = static_cast<std::byte*>(start_);
    const std::size_t skip =
        (huge_page - reinterpret_cast<std::uintptr_t>(first) % huge_page) % huge_page;
    bytes_ = {first + skip, byte_count};
#ifdef MADV_HUGEPAGE
    (void)::madvise(bytes_.data(), byte_count, MADV_HUGEPAGE);
#endif
  }
  MappedByHand(const MappedByHand&) = delete;
  MappedByHand& operator=(const MappedByHand&) = delete;
  ~MappedByHand() {
    ::munmap(start_, reserved_);
  }

  [[nodiscard]] std::span<std::byte> bytes() const noexcept {
    return bytes_;
  }

 private:
  static constexpr std::size_t huge_page = std::size_t{2} << 20;

  std::size_t reserved_;
  void* start_ = nullptr;
  std::span<std::byte> bytes_;
};

}  // namespace block_streamer_benchmarks
