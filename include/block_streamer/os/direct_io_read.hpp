// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/os/direct_io_posix.hpp>
#include <block_streamer/os/file_error.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <system_error>

namespace block_streamer::inline v1 {

/// @brief One read of a file under way, whoever performs it: what to ask the system next, and what
/// an answer means. After a short answer it goes on at the last whole block, since O_DIRECT knows
/// no other offsets; the end of the file is told from a short answer by the number of bytes that
/// must come. Interrupted and refused-for-now calls are repeated, direct reads that the file system
/// refuses after all are repeated through the page cache, all of it a bounded number of times.
/// **Threads.** None of its own; one at a time.
class DirectIoRead {
 public:
  enum class Step : std::uint8_t { done, again, failed };

  DirectIoRead() noexcept = default;
  /// @param out        where bytes go; all of it may be overwritten.
  /// @param needed     how many must come; less than `out` only at the end of the file.
  /// @param alignment  of offset, `out` and its size; 1 through the page cache.
  DirectIoRead(int descriptor, std::uint64_t offset, std::span<std::byte> out, std::uint64_t needed,
               std::uint32_t alignment) noexcept
      : descriptor_{descriptor},
        alignment_{alignment},
        offset_{offset},
        out_{out},
        needed_{needed} {}

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_ + kept_; }
  /// @brief What to ask for now. **Lifetime.** The caller's memory.
  [[nodiscard]] std::span<std::byte> out() const noexcept {
    return out_.subspan(static_cast<std::size_t>(kept_));
  }
  /// @brief The last attempt was refused for now: the next one should be allowed to block.
  [[nodiscard]] bool may_block() const noexcept { return may_block_; }
  [[nodiscard]] std::error_code error() const noexcept { return error_; }

  /// @brief Takes note of an answer: bytes read, or a negative error number.
  [[nodiscard]] Step answered(std::int64_t result) noexcept {
    if (result < 0) return refused(static_cast<int>(-result));
    if (result == 0) return fail(FileErrc::shrank);
    const std::uint64_t got =
        kept_ + std::min<std::uint64_t>(static_cast<std::uint64_t>(result), out_.size() - kept_);
    if (got >= needed_) return Step::done;
    const std::uint64_t whole = round_down(got, alignment_);
    if (whole == kept_) {
      const std::error_code end = end_error();
      return end == FileErrc::shrank ? fail(end) : retry(end);
    }
    kept_ = whole;
    fruitless_ = 0;
    return Step::again;
  }

  /// @brief Performs the rest of it by positional reads, on the calling thread.
  [[nodiscard]] std::error_code finish() noexcept {
    Step step = Step::again;
    while (step == Step::again) {
      const std::size_t wanted = std::min(out().size(), largest_call);
      const ssize_t got = ::pread(descriptor_, out().data(), wanted, static_cast<off_t>(offset()));
      step = answered(got < 0 ? -std::int64_t{errno} : std::int64_t{got});
    }
    return step == Step::done ? std::error_code{} : error_;
  }

  /// One system call moves less than 2 GiB; a power of two keeps the rest aligned.
  static constexpr std::size_t largest_call = std::size_t{1} << 30;

 private:
  static constexpr int most_fruitless = 64;

  Step fail(std::error_code error) noexcept {
    error_ = error;
    return Step::failed;
  }
  Step retry(std::error_code otherwise) noexcept {
    return ++fruitless_ < most_fruitless ? Step::again : fail(otherwise);
  }
  Step refused(int code) noexcept {
    const std::error_code error{code, std::generic_category()};
    if (code == EINTR) return retry(error);
    if (code == EAGAIN) {
      may_block_ = true;
      return retry(error);
    }
    if (code == EINVAL && detail::is_direct(descriptor_)) {
      if (!detail::set_direct(descriptor_, false)) return retry(error);
    } else if (code == EINVAL && alignment_ > 1 && !asked_again_) {
      asked_again_ = true;  // another read of the file has switched it meanwhile
      return Step::again;
    }
    return fail(error);
  }
  /// Less than a block came: the file ends here now, or the device goes on giving less.
  [[nodiscard]] std::error_code end_error() const noexcept {
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0) return detail::last_system_error();
    if (static_cast<std::uint64_t>(status.st_size) < offset_ + needed_) return FileErrc::shrank;
    return std::make_error_code(std::errc::io_error);
  }

  int descriptor_ = -1;
  int fruitless_ = 0;  ///< attempts since bytes came
  std::uint32_t alignment_ = 1;
  bool may_block_ = false;
  bool asked_again_ = false;
  std::uint64_t offset_ = 0;
  std::span<std::byte> out_;
  std::uint64_t needed_ = 0;
  std::uint64_t kept_ = 0;  ///< bytes that need not be asked for again
  std::error_code error_;
};

}  // namespace block_streamer::inline v1
