// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/os/file_access.hpp>
#include <block_streamer/os/file_windows.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

namespace detail {

inline constexpr std::uint32_t usual_sector = 4096;

/// What offsets, lengths and addresses of unbuffered reads must be multiples of, as the volume and
/// the driver say; `usual_sector` where they say nothing, 0 for what nobody could keep to.
[[nodiscard]] inline std::uint32_t stated_sector(HANDLE file) noexcept {
  FILE_STORAGE_INFO storage{};
  FILE_ALIGNMENT_INFO memory{};
  std::uint32_t sector = usual_sector;
  if (::GetFileInformationByHandleEx(file, FileStorageInfo, &storage, sizeof(storage)) != 0 &&
      storage.LogicalBytesPerSector != 0) {
    sector = storage.LogicalBytesPerSector;
  }
  if (::GetFileInformationByHandleEx(file, FileAlignmentInfo, &memory, sizeof(memory)) != 0) {
    sector = std::max<std::uint32_t>(sector, memory.AlignmentRequirement + 1);  // given as a mask
  }
  constexpr std::uint32_t largest = 65'536;  // beyond it staging chunks would not do
  return std::has_single_bit(sector) && sector <= largest ? sector : 0;
}

/// One unbuffered read of the file's beginning: some file systems accept the flag and refuse the
/// read.
[[nodiscard]] inline std::error_code try_unbuffered_read(HANDLE file, std::uint32_t sector) {
  struct FreeAligned {
    std::align_val_t alignment;
    void operator()(std::byte* memory) const noexcept { ::operator delete(memory, alignment); }
  };
  const std::align_val_t alignment{sector};
  const std::unique_ptr<std::byte, FreeAligned> block{
      static_cast<std::byte*>(::operator new(sector, alignment)), FreeAligned{alignment}};
  std::error_code error;
  static_cast<void>(read_and_wait(file, 0, {block.get(), sector}, error));
  return error;
}

}  // namespace detail

/// An open file and how it is read.
struct UnbufferedFile {
  detail::WindowsHandle handle;  ///< overlapped; empty if the file cannot be opened at all
  DirectIo direct;
};

/// @brief Opens a file for overlapped reads past the system's cache (FILE_FLAG_NO_BUFFERING), if
/// they work: proven by one read. Where they do not, it is open through the cache, and `direct`
/// says why. @param error  why the file cannot be opened at all.
/// **Cost.** A few system calls and one read of at most 64 KiB.
[[nodiscard]] inline UnbufferedFile open_unbuffered(const std::filesystem::path& path,
                                                    std::error_code& error) {
  detail::WindowsHandle file = detail::open_overlapped(path, FILE_FLAG_NO_BUFFERING, error);
  std::error_code refused = error;
  if (file) {
    const std::uint32_t stated = detail::stated_sector(file.get());
    refused = std::make_error_code(std::errc::invalid_argument);
    for (const std::uint32_t sector : {stated, std::max(stated, detail::usual_sector)}) {
      if (stated != 0) refused = detail::try_unbuffered_read(file.get(), sector);
      if (!refused) return {std::move(file), {sector, {}}};
    }
    file.close();
  }
  file = detail::open_overlapped(path, 0, error);
  return {std::move(file), {1, "the file system refuses unbuffered reads: " + refused.message()}};
}

}  // namespace block_streamer::inline v1
