// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Zeroed anonymous memory of exactly the asked size (rounded up to a page), 2 MiB aligned,
/// advised to use huge pages before its first touch: page-locking it costs a small part of what it
/// costs over small pages. Where the system has no huge pages it is plain memory.
/// **Cost.** Address space now, memory at first touch.
class HugePages {
 public:
  static constexpr std::size_t alignment = std::size_t{2} << 20;

  HugePages() noexcept = default;

  /// @throws StorageError if the system refuses the memory. 0 bytes give an empty object.
  explicit HugePages(std::size_t byte_count) : byte_count_{byte_count} {
    if (byte_count == 0) return;
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const auto padded = checked_add(byte_count, alignment + page);
    if (!padded) refuse(byte_count, ENOMEM);
    mapped_byte_count_ = round_up(byte_count, page);
    // Reserve enough to find an aligned start in it, then give the ends back.
    const std::size_t reserved = mapped_byte_count_ + alignment - page;
    void* const start =
        ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) refuse(byte_count, errno);
    auto* const first = static_cast<std::byte*>(start);
    const std::size_t skipped =
        (alignment - reinterpret_cast<std::uintptr_t>(first) % alignment) % alignment;
    data_ = first + skipped;
    unmap(first, skipped);
    unmap(data_ + mapped_byte_count_, reserved - skipped - mapped_byte_count_);
#ifdef MADV_HUGEPAGE
    static_cast<void>(::madvise(data_, mapped_byte_count_, MADV_HUGEPAGE));
#endif
  }

  HugePages(HugePages&& other) noexcept
      : data_{std::exchange(other.data_, nullptr)},
        byte_count_{std::exchange(other.byte_count_, 0)},
        mapped_byte_count_{std::exchange(other.mapped_byte_count_, 0)} {}
  HugePages& operator=(HugePages&& other) noexcept {
    if (this != &other) {
      unmap(data_, mapped_byte_count_);
      data_ = std::exchange(other.data_, nullptr);
      byte_count_ = std::exchange(other.byte_count_, 0);
      mapped_byte_count_ = std::exchange(other.mapped_byte_count_, 0);
    }
    return *this;
  }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;
  ~HugePages() {
    unmap(data_, mapped_byte_count_);
  }

  [[nodiscard]] std::span<std::byte> bytes() noexcept {
    return {data_, byte_count_};
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {data_, byte_count_};
  }
  [[nodiscard]] std::size_t size() const noexcept {
    return byte_count_;
  }

 private:
  static void unmap(std::byte* start, std::size_t byte_count) noexcept {
    if (byte_count != 0) static_cast<void>(::munmap(start, byte_count));
  }
  [[noreturn]] static void refuse(std::size_t byte_count, int code) {
    throw StorageError{"memory", "cannot reserve " + std::to_string(byte_count) + " bytes",
                       std::error_code{code, std::generic_category()}};
  }

  std::byte* data_ = nullptr;
  std::size_t byte_count_ = 0;
  std::size_t mapped_byte_count_ = 0;  ///< byte_count_ rounded up to a page
};

}  // namespace block_streamer::inline v1
