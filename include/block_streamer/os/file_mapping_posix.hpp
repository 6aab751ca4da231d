// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file_posix.hpp>
#include <block_streamer/os/mapping_advice.hpp>

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A whole file mapped read-only and shared: its pages are the page cache's, take no private
/// memory and are read when touched.
/// A mapping whose file shrinks, or whose file system fails, raises SIGBUS when touched. copy_out()
/// never does; bytes() is for those who accept that risk.
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
      void* const start =
          ::mmap(nullptr, byte_count_, PROT_READ, MAP_SHARED, file_.native_handle(), 0);
      if (start == MAP_FAILED) {
        error = detail::last_system_error();
      } else {
        data_ = static_cast<std::byte*>(start);
      }
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
  /// @brief The mapping itself. Touching it may raise SIGBUS, see the class.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, byte_count_}; }

  /// @brief Fills all of `out` from `offset` on, without a signal whatever happens to the file.
  /// The system copies on our behalf and reports a page that cannot be had; where it refuses that
  /// service (sandboxes do), and to learn why a page could not be had, the file is read instead.
  /// @returns FileErrc::shrank if the file now ends before the range does, also where its last page
  /// still answers with zeros; else the system's error. **Cost.** One copy, page faults included.
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

  /// @brief Tells the system how the mapping will be touched. A hint: failure is ignored.
  void expect(MappingAdvice advice) const noexcept {
    advise({0, byte_count_}, advice == MappingAdvice::sequential ? MADV_SEQUENTIAL
                             : advice == MappingAdvice::random   ? MADV_RANDOM
                                                                 : MADV_NORMAL);
  }
  /// @brief Asks the system to read a range ahead. A hint: failure is ignored.
  void will_need(ByteRange range) const noexcept { advise(range, MADV_WILLNEED); }
  /// @brief Takes the range's whole pages out of this process; they may stay in the page cache.
  /// The bytes are read again when touched.
  void drop_pages(ByteRange range) const noexcept { advise(range, MADV_DONTNEED); }

 private:
  /// @returns how many bytes were copied before the system refused or met a bad page.
  [[nodiscard]] std::size_t copy_guarded(std::uint64_t offset,
                                         std::span<std::byte> out) const noexcept {
    std::size_t copied = 0;
#ifdef __linux__
    while (copied != out.size()) {
      const std::size_t wanted = std::min(out.size() - copied, largest_copy);
      const iovec to{out.data() + copied, wanted};
      const iovec from{data_ + offset + copied, wanted};
      const ssize_t got = ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0);
      if (got <= 0) break;
      copied += static_cast<std::size_t>(got);
    }
#endif
    return copied;
  }

  void advise(ByteRange range, int advice) const noexcept {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t end = std::min(byte_count_, range.end());
    // Only whole pages are dropped: neighbours on a shared page may still be in use.
    const std::uint64_t begin =
        advice == MADV_DONTNEED ? round_up(range.offset, page) : round_down(range.offset, page);
    const std::uint64_t last =
        advice == MADV_DONTNEED && end != byte_count_ ? round_down(end, page) : end;
    if (begin < last) static_cast<void>(::madvise(data_ + begin, last - begin, advice));
  }

  void unmap() noexcept {
    if (data_ != nullptr) static_cast<void>(::munmap(std::exchange(data_, nullptr), byte_count_));
  }

  static constexpr std::size_t largest_copy = std::size_t{1} << 30;

  File file_;
  std::byte* data_ = nullptr;
  std::uint64_t byte_count_ = 0;
};

}  // namespace block_streamer::inline v1
