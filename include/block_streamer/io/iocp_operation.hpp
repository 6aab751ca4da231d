// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/io/read_group.hpp>
#include <block_streamer/os/file_windows.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// A piece of an open file to read.
struct IocpRead {
  HANDLE file = nullptr;  ///< attached to the port that reads it
  std::uint64_t offset = 0;
  std::span<std::byte> out;     ///< at most 1 GiB; all of it may be overwritten
  std::uint64_t needed = 0;     ///< how many bytes must come; less than `out` at the file's end
  std::uint32_t alignment = 1;  ///< of offset, `out` and its size; 1 through the system's cache
};

/// @brief A read under way: what to ask the system next, and what an answer means. After a short
/// answer it goes on at the last whole sector, since unbuffered reads know no other offsets; the
/// end of the file is told from a short answer by the number of bytes that must come.
/// **Threads.** The port's, once it is accepted; `cancelled` and the links under the port's mutex.
struct IocpOperation : OVERLAPPED {
  enum class Step : std::uint8_t {
    done,
    again,  ///< ask for what is left
    later,  ///< the system has no room for a request now; it has again once another has ended
    failed
  };

  IocpOperation(const IocpRead& asked, IoCompletion completion, ReadGroup* owner) noexcept
      : OVERLAPPED{}, read{asked}, done{std::move(completion)}, group{owner} {}

  /// @brief Prepares the next request. @returns where its bytes go.
  [[nodiscard]] std::span<std::byte> next_request() noexcept {
    static_cast<OVERLAPPED&>(*this) = detail::overlapped_at(read.offset + kept);
    const std::uint64_t end =
        std::min<std::uint64_t>(round_up(read.needed, read.alignment), read.out.size());
    return read.out.subspan(static_cast<std::size_t>(kept), static_cast<std::size_t>(end - kept));
  }

  /// @brief Takes note of an answer: an error of the system's, or how many bytes came.
  [[nodiscard]] Step answered(DWORD code, std::uint64_t byte_count) noexcept {
    switch (code) {
      case ERROR_SUCCESS:
        return received(byte_count);
      case ERROR_HANDLE_EOF:
        return received(0);
      case ERROR_OPERATION_ABORTED:
        return fail(std::make_error_code(std::errc::operation_canceled));
      case ERROR_INVALID_USER_BUFFER:  // so it is called when too many requests are outstanding
      case ERROR_NOT_ENOUGH_MEMORY:
      case ERROR_NOT_ENOUGH_QUOTA:
      case ERROR_NO_SYSTEM_RESOURCES:
      case ERROR_WORKING_SET_QUOTA:
        error = detail::windows_error(code);
        return Step::later;
      default:
        return fail(detail::windows_error(code));
    }
  }

  IocpRead read;
  IoCompletion done;
  ReadGroup* group = nullptr;
  IocpOperation* next = nullptr;   ///< waiting after this one
  IocpOperation* newer = nullptr;  ///< all accepted operations, in a chain
  IocpOperation* older = nullptr;  ///
  std::uint64_t kept = 0;          ///< bytes that need not be asked for again
  std::error_code error;           ///< of the last answer
  int fruitless = 0;               ///< answers since bytes came
  bool cancelled = false;

 private:
  static constexpr int most_fruitless = 16;

  Step received(std::uint64_t byte_count) noexcept {
    const std::uint64_t got = kept + byte_count;
    if (got >= read.needed) return Step::done;
    const std::uint64_t whole = round_down(got, read.alignment);
    if (whole != kept) {
      kept = whole;
      fruitless = 0;
      return Step::again;
    }
    const std::uint64_t size = detail::file_size(read.file, error);
    if (error) return Step::failed;
    if (size < read.offset + read.needed) return fail(FileErrc::shrank);
    // The file reaches so far, and yet less than a sector came.
    if (++fruitless < most_fruitless) return Step::again;
    return fail(std::make_error_code(std::errc::io_error));
  }
  Step fail(std::error_code why) noexcept {
    error = why;
    return Step::failed;
  }
};

}  // namespace block_streamer::inline v1
