// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/os/windows_api.hpp>

#include <concepts>
#include <cstddef>
#include <span>

namespace block_streamer::inline v1 {

/// @brief What a completion port asks of the system while it runs, and the seam at which tests
/// shorten, refuse and reorder its answers.
/// - `read(file, out, overlapped)`: starts a read. ERROR_SUCCESS and ERROR_IO_PENDING both mean
/// that a packet will come; any other error that none will.
/// - `wait(port, entries)`: waits for packets. @returns how many came, at least one.
/// **Threads.** The port's own.
template <class C>
concept iocp_calls = std::movable<C> &&
    requires(C& calls, HANDLE file, HANDLE port, std::span<std::byte> out, OVERLAPPED* overlapped,
             std::span<OVERLAPPED_ENTRY> entries) {
  { calls.read(file, out, overlapped) }
  noexcept->std::same_as<DWORD>;
  { calls.wait(port, entries) }
  noexcept->std::same_as<std::size_t>;
};

/// The system itself.
struct SystemIocpCalls {
  [[nodiscard]] DWORD read(HANDLE file, std::span<std::byte> out, OVERLAPPED* overlapped) noexcept {
    const BOOL done =
        ::ReadFile(file, out.data(), static_cast<DWORD>(out.size()), nullptr, overlapped);
    return done != 0 ? ERROR_SUCCESS : ::GetLastError();
  }
  [[nodiscard]] std::size_t wait(HANDLE port, std::span<OVERLAPPED_ENTRY> entries) noexcept {
    ULONG count = 0;
    // It cannot fail but for a port that is closed, which outlives its thread.
    while (::GetQueuedCompletionStatusEx(port, entries.data(), static_cast<ULONG>(entries.size()),
                                         &count, INFINITE, FALSE) == 0 ||
           count == 0) {
    }
    return count;
  }
};
static_assert(iocp_calls<SystemIocpCalls>);

}  // namespace block_streamer::inline v1
