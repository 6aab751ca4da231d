// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/ring_read.hpp>
#include <block_streamer/io/uring_options.hpp>
#include <block_streamer/io/uring_refusal.hpp>

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A ring of the system's. @see read_ring
/// Answers are delivered inside submit_and_wait where the system can do that, which keeps other
/// threads from being interrupted. An eventfd that is always being read is what wakes it.
class UringRing {
 public:
  /// @brief Sets a ring up, with fewer flags where the system does not know them, and proves it
  /// with one empty request: filters may allow the set-up and forbid the rest.
  /// @returns nullptr with the reason in `report`.
  [[nodiscard]] static std::unique_ptr<UringRing> open(const UringOptions& options,
                                                       UringReport& report) {
    std::unique_ptr<UringRing> ring{new UringRing};
    if (const int error = ring->set_up(options, report); error < 0) {
      report.refusal = uring_refusal(-error);
      return nullptr;
    }
    return ring;
  }
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;
  ~UringRing() {
    stop_listening();
    if (buffer_table_) static_cast<void>(::io_uring_unregister_buffers(&ring_));
    if (open_) ::io_uring_queue_exit(&ring_);
    if (event_ >= 0) static_cast<void>(::close(event_));
  }

  bool push(const RingRead& read) noexcept {
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) return false;
    const auto byte_count = static_cast<unsigned>(read.out.size());
    if (read.buffer) {
      ::io_uring_prep_read_fixed(entry, read.descriptor, read.out.data(), byte_count, read.offset,
                                 static_cast<int>(*read.buffer));
    } else {
      ::io_uring_prep_read(entry, read.descriptor, read.out.data(), byte_count, read.offset);
    }
    if (read.may_block) entry->flags |= IOSQE_ASYNC;
    ::io_uring_sqe_set_data64(entry, read.tag);
    return true;
  }
  [[nodiscard]] int submit_and_wait() noexcept {
    if (!listening_) listen();
    return std::min(::io_uring_submit_and_wait(&ring_, 1), 0);
  }
  template <class Take>
  void take_back(Take&& take) {
    const unsigned count = ::io_uring_sq_ready(&ring_);
    for (unsigned i = ring_.sq.sqe_tail - count; i != ring_.sq.sqe_tail; ++i) {
      io_uring_sqe* const entry = &ring_.sq.sqes[i & ring_.sq.ring_mask];
      const std::uint64_t tag = entry->user_data;
      if (tag == wake_tag) listening_ = false;
      ::io_uring_prep_nop(entry);
      ::io_uring_sqe_set_data64(entry, no_tag);
      if (tag < no_tag) take(tag);
    }
  }
  void pause() noexcept {
    pollfd waited{ring_.ring_fd, POLLIN, 0};
    static_cast<void>(::poll(&waited, 1, pause_ms));
  }
  template <class Take>
  void reap(Take&& take) {
    io_uring_cqe* answer = nullptr;
    while (::io_uring_peek_cqe(&ring_, &answer) == 0) {
      const std::uint64_t tag = ::io_uring_cqe_get_data64(answer);
      const std::int32_t result = answer->res;
      ::io_uring_cqe_seen(&ring_, answer);
      if (tag == wake_tag) listening_ = false;
      if (tag < no_tag) take(tag, result);
    }
  }
  void wake() noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(::write(event_, &one, sizeof one));
  }

  [[nodiscard]] std::error_code add_buffer(std::uint32_t index,
                                           std::span<std::byte> memory) noexcept {
    if (!buffer_table_) return {table_error_, std::generic_category()};
    return set_buffer(index, {memory.data(), memory.size()});
  }
  void remove_buffer(std::uint32_t index) noexcept {
    static_cast<void>(set_buffer(index, {nullptr, 0}));
  }

  static constexpr std::uint32_t buffer_slots = 64;

 private:
  static constexpr std::uint64_t wake_tag = ~std::uint64_t{0};
  static constexpr std::uint64_t no_tag = wake_tag - 1;  ///< of empty requests
  static constexpr int pause_ms = 10;

  UringRing() = default;

  /// @returns 0, or a negative error number.
  [[nodiscard]] int set_up(const UringOptions& options, UringReport& report) noexcept {
    event_ = ::eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) return -errno;
    int error = climb_down(options.queue_depth + 2, report);
    if (error == 0) error = knows_reads();
    if (error == 0) error = try_out();
    if (error == 0 && options.fixed_buffers) make_buffer_table();
    return error;
  }
  /// Tries set-ups from the best to the plainest; a flag that the system does not know is EINVAL.
  [[nodiscard]] int climb_down(unsigned entries, UringReport& report) noexcept {
    struct SetUp {
      unsigned flags;
      const char* name;
    };
    constexpr std::array<SetUp, 4> set_ups{{
        {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, "single_issuer, defer_taskrun"},
        {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN, "single_issuer, coop_taskrun"},
        {IORING_SETUP_COOP_TASKRUN, "coop_taskrun"},
        {0, "no flags"},
    }};
    int error = -EINVAL;
    for (const SetUp& one : set_ups) {
      error = ::io_uring_queue_init(entries, &ring_, one.flags);
      open_ = error == 0;
      if (open_) report.setup = one.name;
      if (error != -EINVAL) break;
    }
    return error;
  }
  /// Reads with a plain buffer came later than rings.
  [[nodiscard]] int knows_reads() noexcept {
    constexpr unsigned most = 256;
    alignas(io_uring_probe)
        std::array<std::byte, sizeof(io_uring_probe) + most * sizeof(io_uring_probe_op)>
            memory{};
    auto* const probe = reinterpret_cast<io_uring_probe*>(memory.data());
    const int error = ::io_uring_register_probe(&ring_, probe, most);
    if (error < 0) return error;
    const bool known = ::io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                       ::io_uring_opcode_supported(probe, IORING_OP_READ_FIXED) != 0;
    return known ? 0 : -EOPNOTSUPP;
  }
  [[nodiscard]] int try_out() noexcept {
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) return -ENOMEM;
    ::io_uring_prep_nop(entry);
    ::io_uring_sqe_set_data64(entry, no_tag);
    int result = -EINTR;
    while (result == -EINTR || result == -EAGAIN) {
      result = ::io_uring_submit_and_wait(&ring_, 1);
    }
    reap([](std::uint64_t, std::int32_t) {});
    return std::min(result, 0);
  }
  void make_buffer_table() noexcept {
    const int error = ::io_uring_register_buffers_sparse(&ring_, buffer_slots);
    buffer_table_ = error == 0;
    table_error_ = -error;
  }
  [[nodiscard]] std::error_code set_buffer(std::uint32_t index, iovec memory) noexcept {
    if (!buffer_table_ || index >= buffer_slots) return {ENOBUFS, std::generic_category()};
    __u64 untagged = 0;
    const int set = ::io_uring_register_buffers_update_tag(&ring_, index, &memory, &untagged, 1);
    return set == 1 ? std::error_code{}
                    : std::error_code{set < 0 ? -set : EIO, std::generic_category()};
  }
  void listen() noexcept {
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) return;  // the queue is full, so the wait will end; then again
    ::io_uring_prep_read(entry, event_, &event_count_, sizeof event_count_, 0);
    ::io_uring_sqe_set_data64(entry, wake_tag);
    listening_ = true;
  }
  /// The system must not write to event_count_ once it is gone.
  void stop_listening() noexcept {
    if (!open_ || !listening_) return;
    wake();
    while (listening_) {
      const int error = ::io_uring_submit_and_wait(&ring_, 1);
      if (error < 0 && error != -EINTR && error != -EAGAIN) return;
      reap([](std::uint64_t, std::int32_t) {});
    }
  }

  io_uring ring_{};
  bool open_ = false;
  int event_ = -1;
  std::uint64_t event_count_ = 0;  ///< the system writes here
  bool listening_ = false;         ///< a read of event_ is queued or in the ring
  bool buffer_table_ = false;
  int table_error_ = ENOBUFS;
};
static_assert(read_ring<UringRing>);

}  // namespace block_streamer::inline v1
