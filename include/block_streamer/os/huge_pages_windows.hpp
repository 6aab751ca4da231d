// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Zeroed memory of exactly the asked size (rounded up to a page), 2 MiB aligned, as its
/// twin for POSIX systems. Its pages are small ones: Windows gives large pages only to accounts
/// that hold a privilege of their own (SeLockMemoryPrivilege), and never pages them out.
/// **Cost.** Address space and commit charge now, memory at first touch.
class HugePages {
 public:
  static constexpr std::size_t alignment = std::size_t{2} << 20;

  HugePages() noexcept = default;

  /// @throws StorageError if the system refuses the memory. 0 bytes give an empty object.
  explicit HugePages(std::size_t byte_count) : byte_count_{byte_count} {
    if (byte_count == 0) return;
    const auto padded = checked_add(byte_count, alignment);
    if (!padded) refuse(byte_count, ERROR_NOT_ENOUGH_MEMORY);
    // Address space enough to find an aligned start in it; only the aligned part gets memory.
    reserved_ = ::VirtualAlloc(nullptr, *padded, MEM_RESERVE, PAGE_NOACCESS);
    if (reserved_ == nullptr) refuse(byte_count, ::GetLastError());
    const auto start =
        static_cast<std::size_t>(round_up(reinterpret_cast<std::uintptr_t>(reserved_), alignment));
    data_ = static_cast<std::byte*>(
        ::VirtualAlloc(reinterpret_cast<void*>(start), byte_count, MEM_COMMIT, PAGE_READWRITE));
    if (data_ == nullptr) {
      const DWORD code = ::GetLastError();
      release();
      refuse(byte_count, code);
    }
  }

  HugePages(HugePages&& other) noexcept
      : reserved_{std::exchange(other.reserved_, nullptr)},
        data_{std::exchange(other.data_, nullptr)},
        byte_count_{std::exchange(other.byte_count_, 0)} {}
  HugePages& operator=(HugePages&& other) noexcept {
    if (this != &other) {
      release();
      reserved_ = std::exchange(other.reserved_, nullptr);
      data_ = std::exchange(other.data_, nullptr);
      byte_count_ = std::exchange(other.byte_count_, 0);
    }
    return *this;
  }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;
  ~HugePages() { release(); }

  [[nodiscard]] std::span<std::byte> bytes() noexcept { return {data_, byte_count_}; }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, byte_count_}; }
  [[nodiscard]] std::size_t size() const noexcept { return byte_count_; }

 private:
  void release() noexcept {
    if (reserved_ != nullptr) {
      static_cast<void>(::VirtualFree(std::exchange(reserved_, nullptr), 0, MEM_RELEASE));
    }
  }
  [[noreturn]] static void refuse(std::size_t byte_count, DWORD code) {
    throw StorageError{"memory", "cannot reserve " + std::to_string(byte_count) + " bytes",
                       detail::windows_error(code)};
  }

  void* reserved_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t byte_count_ = 0;
};

}  // namespace block_streamer::inline v1
