// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/os/file_access.hpp>
#include <block_streamer/os/file_posix.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <system_error>

namespace block_streamer::inline v1 {

namespace detail {

inline constexpr std::uint32_t usual_direct_alignment = 4096;

/// @brief True if the descriptor reads past the page cache at this moment.
[[nodiscard]] inline bool is_direct(int descriptor) noexcept {
#ifdef O_DIRECT
  const int flags = ::fcntl(descriptor, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0;
#else
  return static_cast<void>(descriptor), false;
#endif
}

/// @brief Switches an open descriptor; reads in flight keep the way in which they began.
[[nodiscard]] inline std::error_code set_direct(int descriptor, bool direct) noexcept {
#ifdef O_DIRECT
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0) return last_system_error();
  const int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
  return ::fcntl(descriptor, F_SETFL, wanted) == 0 ? std::error_code{} : last_system_error();
#else
  static_cast<void>(descriptor);
  return direct ? std::make_error_code(std::errc::not_supported) : std::error_code{};
#endif
}

/// What the file system says: an alignment, 0 for "not this file", or `usual` where it says
/// nothing.
[[nodiscard]] inline std::uint32_t stated_alignment(int descriptor) noexcept {
#ifdef STATX_DIOALIGN
  struct statx about {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) == 0 &&
      (about.stx_mask & STATX_DIOALIGN) != 0) {
    if (about.stx_dio_offset_align == 0) return 0;
    return std::max({about.stx_dio_offset_align, about.stx_dio_mem_align, 512U});
  }
#else
  static_cast<void>(descriptor);
#endif
  return usual_direct_alignment;
}

/// A file in memory accepts O_DIRECT on newer kernels, to no effect.
[[nodiscard]] inline bool lives_in_memory(int descriptor) noexcept {
#ifdef __linux__
  struct statfs about {};
  return ::fstatfs(descriptor, &about) == 0 &&
         (about.f_type == TMPFS_MAGIC || about.f_type == RAMFS_MAGIC);
#else
  return static_cast<void>(descriptor), false;
#endif
}

struct FreeAligned {
  void operator()(std::byte* memory) const noexcept { std::free(memory); }
};

/// One direct read of the file's beginning: some file systems accept the flag and refuse the read.
[[nodiscard]] inline std::error_code try_direct_read(int descriptor, std::uint32_t alignment) {
  const std::unique_ptr<std::byte, FreeAligned> block{
      static_cast<std::byte*>(std::aligned_alloc(alignment, alignment))};
  if (!block) throw std::bad_alloc{};
  ssize_t got = -1;
  do {
    got = ::pread(descriptor, block.get(), alignment, 0);
  } while (got < 0 && errno == EINTR);
  return got < 0 ? last_system_error() : std::error_code{};
}

}  // namespace detail

/// @brief Switches an open file to reads past the page cache, if they work: proven by one read.
/// Where they do not, the file stays as it was. @pre no read of it in flight.
/// @returns the alignment to keep to, or the reason of a refusal: the file system's, or that the
/// file lies in memory anyway.
/// **Cost.** A few system calls and one read of at most 64 KiB.
[[nodiscard]] inline DirectIo enable_direct_io(const File& file) {
  const int descriptor = file.native_handle();
  if (detail::lives_in_memory(descriptor)) return {1, "the file lies in memory"};
  const std::uint32_t stated = detail::stated_alignment(descriptor);
  constexpr std::uint32_t largest = 65'536;  // beyond it staging chunks would not do
  if (stated == 0 || stated > largest) return {1, "the file system refuses O_DIRECT for this file"};
  std::error_code error = detail::set_direct(descriptor, true);
  for (const std::uint32_t alignment : {stated, std::max(stated, detail::usual_direct_alignment)}) {
    if (!error) error = detail::try_direct_read(descriptor, alignment);
    if (!error) return {alignment, {}};
    if (error != std::errc::invalid_argument) break;
    error = detail::set_direct(descriptor, true);
  }
  if (!error) error = std::make_error_code(std::errc::invalid_argument);
  static_cast<void>(detail::set_direct(descriptor, false));
  return {1, "the file system refuses O_DIRECT: " + error.message()};
}

}  // namespace block_streamer::inline v1
