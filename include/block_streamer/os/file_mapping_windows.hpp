// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_windows.hpp>
#include <block_streamer/os/mapping_advice.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A whole file mapped read-only and shared: its pages are the system's file cache, take no
/// private memory and are read when touched.
/// While it is mapped, Windows refuses to make the file shorter (ERROR_USER_MAPPED_FILE); a page
/// that its file system cannot serve still raises an exception when touched. copy_out() never does;
/// bytes() is for those who accept that risk.
/// **Threads.** Every function may be called from many threads at once.
class FileMapping {
 public:
  FileMapping() noexcept = default;

  /// @throws StorageError naming the path if it cannot be opened or mapped. An empty file is an
  /// empty mapping.
  explicit FileMapping(const std::filesystem::path& path) : file_{File::open(path)} {
    std::error_code error;
    byte_count_ = file_.size(error);
    if (!error && byte_count_ != 0) {
      // The view keeps the section alive; its handle is not needed beyond this.
      const detail::WindowsHandle section{::CreateFileMappingW(
          file_.native_handle(), nullptr, PAGE_READONLY, static_cast<DWORD>(byte_count_ >> 32),
          static_cast<DWORD>(byte_count_), nullptr)};
      if (section) {
        data_ = static_cast<std::byte*>(::MapViewOfFile(section.get(), FILE_MAP_READ, 0, 0,
                                                        static_cast<std::size_t>(byte_count_)));
      }
      if (data_ == nullptr) error = detail::last_system_error();
    }
    if (error) throw StorageError{path.string(), "cannot map the file", error};
  }

  FileMapping(FileMapping&& other) noexcept
      : file_{std::move(other.file_)},
        data_{std::exchange(other.data_, nullptr)},
        byte_count_{std::exchange(other.byte_count_, 0)} {}
  FileMapping& operator=(FileMapping&& other) noexcept {
    if (this != &other) {
      unmap();
      file_ = std::move(other.file_);
      data_ = std::exchange(other.data_, nullptr);
      byte_count_ = std::exchange(other.byte_count_, 0);
    }
    return *this;
  }
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;
  ~FileMapping() { unmap(); }

  /// @brief Size when it was mapped, in bytes.
  [[nodiscard]] std::uint64_t size() const noexcept { return byte_count_; }
  [[nodiscard]] const File& file() const noexcept { return file_; }
  /// @brief The mapping itself. Touching it may raise an exception, see the class.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {data_, static_cast<std::size_t>(byte_count_)};
  }

  /// @brief Fills all of `out` from `offset` on, without an exception whatever happens to the file.
  /// The system copies on our behalf and reports a page that cannot be had; to learn why it could
  /// not, and where the system refuses that service, the file is read instead.
  /// @returns FileErrc::shrank if the file now ends before the range does; else the system's error.
  /// **Cost.** One copy, page faults included.
  [[nodiscard]] std::error_code copy_out(std::uint64_t offset,
                                         std::span<std::byte> out) const noexcept {
    if (offset > byte_count_ || out.size() > byte_count_ - offset) return FileErrc::shrank;
    const std::uint64_t end = offset + out.size();
    const std::size_t copied = copy_guarded(offset, out);
    if (copied != out.size()) {
      if (auto error = file_.read_at(offset + copied, out.subspan(copied))) return error;
    }
    std::error_code error;
    const std::uint64_t size_now = file_.size(error);
    if (!error && size_now < end) error = FileErrc::shrank;
    return error;
  }

  /// @brief As its twin's; Windows takes no such advice for mappings, so nothing changes.
  void expect(MappingAdvice) const noexcept {}
  /// @brief Asks the system to read a range ahead. A hint: failure is ignored.
  void will_need(ByteRange range) const noexcept {
    const std::uint64_t end = std::min(byte_count_, range.end());
    if (range.offset >= end) return;
    WIN32_MEMORY_RANGE_ENTRY entry{data_ + range.offset,
                                   static_cast<std::size_t>(end - range.offset)};
    static_cast<void>(::PrefetchVirtualMemory(::GetCurrentProcess(), 1, &entry, 0));
  }
  /// @brief Takes the range's whole pages out of this process; they may stay in the file cache. The
  /// bytes are read again when touched.
  void drop_pages(ByteRange range) const noexcept {
    SYSTEM_INFO system{};
    ::GetSystemInfo(&system);
    const std::uint64_t end = std::min(byte_count_, range.end());
    // Only whole pages are dropped: neighbours on a shared page may still be in use.
    const std::uint64_t begin = round_up(range.offset, system.dwPageSize);
    const std::uint64_t last = end != byte_count_ ? round_down(end, system.dwPageSize) : end;
    // Unlocking pages that are not locked takes them out of the working set; it then "fails".
    if (begin < last) {
      static_cast<void>(::VirtualUnlock(data_ + begin, static_cast<std::size_t>(last - begin)));
    }
  }

 private:
  /// @returns how many bytes were copied before the system refused or met a bad page.
  [[nodiscard]] std::size_t copy_guarded(std::uint64_t offset,
                                         std::span<std::byte> out) const noexcept {
    std::size_t copied = 0;
    while (copied != out.size()) {
      const std::size_t wanted = std::min(out.size() - copied, largest_copy);
      SIZE_T got = 0;
      if (::ReadProcessMemory(::GetCurrentProcess(), data_ + offset + copied, out.data() + copied,
                              wanted, &got) == 0 ||
          got == 0) {
        break;  // what a failed call says about `got` is not relied on
      }
      copied += got;
    }
    return copied;
  }

  void unmap() noexcept {
    if (data_ != nullptr) static_cast<void>(::UnmapViewOfFile(std::exchange(data_, nullptr)));
  }

  static constexpr std::size_t largest_copy = std::size_t{1} << 30;

  File file_;
  std::byte* data_ = nullptr;
  std::uint64_t byte_count_ = 0;
};

}  // namespace block_streamer::inline v1
