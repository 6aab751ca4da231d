// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/io/read_group.hpp>
#include <block_streamer/io/ring_buffers.hpp>
#include <block_streamer/io/ring_read.hpp>
#include <block_streamer/io/uring_options.hpp>
#include <block_streamer/os/direct_io_read.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What is to be read out of one file.
struct FileRead {
  int descriptor = -1;
  std::uint64_t offset = 0;
  std::span<std::byte> out;     ///< filled; zeros beyond the bytes that are there
  std::uint64_t needed = 0;     ///< how many bytes the file has there, at most out.size()
  std::uint32_t alignment = 1;  ///< of offset, `out` and its size; 1 through the page cache
};

/// A FileRead under way, as one of a list.
struct RingOperation {
  FileRead read;
  IoCompletion done;
  ReadGroup* group = nullptr;    ///< left after `done` was called
  std::span<std::byte> asked{};  ///< the part of read.out that the system is asked for
  std::uint64_t issued = 0;      ///< of `asked`
  std::uint32_t in_flight = 0;
  std::error_code error{};
  RingOperation* next = nullptr;

  /// @brief nullptr where memory is refused: `done` is then as it was.
  [[nodiscard]] static RingOperation* make(const FileRead& read, IoCompletion& done,
                                           ReadGroup* group) noexcept {
    return new (std::nothrow) RingOperation{read, std::move(done), group};
  }
  /// @brief Reports the end, and is gone.
  static void end(RingOperation* self) noexcept {
    IoCompletion done = std::move(self->done);
    const std::error_code error = self->error;
    const std::span<std::byte> out = self->read.out;
    if (!error) std::ranges::fill(out.subspan(self->read.needed), std::byte{0});
    ReadGroup* const group = self->group;
    delete self;
    done(error, error ? 0 : out.size());
    if (group != nullptr) group->leave();
  }
};

/// @brief Turns file reads into requests to a ring and its answers into completions: cuts, keeps
/// queue_depth of them in the ring, goes on after short answers, repeats what may be repeated. What
/// a ring that fails does not take is read here, on its thread.
/// **Threads.** The ring's. **Lifetime.** Ends idle.
template <read_ring Ring>
class RingReader {
 public:
  RingReader(Ring& ring, const UringOptions& options)
      : ring_{ring}, options_{options}, slots_(options.queue_depth) {
    for (std::uint32_t i = options.queue_depth; i-- > 0;) free_.push_back(i);
    again_.reserve(options.queue_depth);
  }

  /// @brief Takes a read over; it begins in a later turn. @pre op.asked is not empty.
  void accept(RingOperation* op) noexcept {
    (tail_ == nullptr ? head_ : tail_->next) = op;
    tail_ = op;
  }
  [[nodiscard]] bool idle() const noexcept {
    return head_ == nullptr && free_.size() == slots_.size();
  }
  /// @brief Hands over what fits, waits for an answer or a wake, reports what has ended.
  void turn() noexcept {
    issue();
    const int error = ring_.submit_and_wait();
    if (error == 0 || error == -EINTR) {
      failures_ = 0;
    } else if (++failures_ > most_failures) {
      read_here();
    } else {
      ring_.pause();  // short of memory, most likely
    }
    ring_.reap([this](std::uint64_t tag, std::int32_t result) {
      answered(static_cast<std::uint32_t>(tag), result);
    });
  }

  /// @brief Pins memory that reads will go to. A refusal is kept and costs nothing but time.
  void pin(std::span<std::byte> memory) {
    if (!options_.fixed_buffers || !fixed_refusal_.empty() || memory.empty()) return;
    fixed_refusal_ = buffers_.add(ring_, memory);
  }
  void unpin(std::span<const std::byte> memory) { buffers_.remove(ring_, memory); }
  [[nodiscard]] const std::string& fixed_refusal() const noexcept { return fixed_refusal_; }
  [[nodiscard]] std::uint64_t fixed_byte_count() const noexcept { return buffers_.byte_count(); }

 private:
  struct Slot {
    DirectIoRead read;
    RingOperation* op = nullptr;
    bool fixed = false;  ///< the latest request used a pinned buffer
    bool plain = false;  ///< the system refused one that did
  };
  static constexpr int most_failures = 16;

  void issue() noexcept {
    while (!again_.empty() && push(again_.back())) again_.pop_back();
    while (again_.empty() && head_ != nullptr && !free_.empty()) {
      const std::uint32_t index = begin_request();
      if (!push(index)) again_.push_back(index);
    }
  }
  /// The next piece of the oldest read. @pre there is one, and a free slot.
  [[nodiscard]] std::uint32_t begin_request() noexcept {
    RingOperation& op = *head_;
    const std::uint32_t index = free_.back();
    free_.pop_back();
    const std::uint64_t step = std::max<std::uint64_t>(
        round_down(options_.request_byte_count, op.read.alignment), op.read.alignment);
    const auto count =
        static_cast<std::size_t>(std::min<std::uint64_t>(step, op.asked.size() - op.issued));
    slots_[index] = {
        DirectIoRead{op.read.descriptor, op.read.offset + op.issued,
                     op.asked.subspan(op.issued, count),
                     std::min<std::uint64_t>(count, op.read.needed - op.issued), op.read.alignment},
        &op};
    op.issued += count;
    ++op.in_flight;
    if (op.issued == op.asked.size()) drop_head();
    return index;
  }
  void drop_head() noexcept {
    head_ = std::exchange(head_->next, nullptr);
    if (head_ == nullptr) tail_ = nullptr;
  }
  [[nodiscard]] bool push(std::uint32_t index) noexcept {
    Slot& slot = slots_[index];
    const auto buffer =
        slot.plain || !fixed_refusal_.empty() ? std::nullopt : buffers_.find(slot.read.out());
    slot.fixed = buffer.has_value();
    // Copies out of the page cache run where they do not hold the ring's thread up.
    const bool may_block = slot.read.may_block() || slot.op->read.alignment == 1;
    return ring_.push(
        {slot.read.descriptor(), slot.read.offset(), slot.read.out(), buffer, may_block, index});
  }

  void answered(std::uint32_t index, std::int32_t result) noexcept {
    Slot& slot = slots_[index];
    if (slot.fixed && refuses_buffer(result)) {
      slot.plain = true;
      again_.push_back(index);
      return;
    }
    // Only a plain request that succeeds where the other did not says that the buffer was to blame.
    if (std::exchange(slot.plain, false) && result > 0) refuse_buffers();
    switch (slot.read.answered(result)) {
      case DirectIoRead::Step::again:
        if (slot.op->error) return retire(index, slot.op->error);
        again_.push_back(index);
        return;
      case DirectIoRead::Step::done:
        return retire(index, {});
      case DirectIoRead::Step::failed:
        return retire(index, slot.read.error());
    }
  }
  static bool refuses_buffer(std::int32_t result) noexcept {
    return result == -EFAULT || result == -EINVAL || result == -EOPNOTSUPP;
  }
  void refuse_buffers() noexcept {
    if (fixed_refusal_.empty()) fixed_refusal_ = "the system refused a read into pinned memory";
  }

  void retire(std::uint32_t index, std::error_code error) noexcept {
    RingOperation* const op = slots_[index].op;
    free_.push_back(index);
    --op->in_flight;
    if (error && !op->error) op->error = error;
    if (op->error && op == head_) {  // what was not begun of it never will be
      op->issued = op->asked.size();
      drop_head();
    }
    if (op->in_flight == 0 && op->issued == op->asked.size()) RingOperation::end(op);
  }

  /// Whatever the ring has not taken.
  void read_here() noexcept {
    ring_.take_back(
        [this](std::uint64_t tag) { again_.push_back(static_cast<std::uint32_t>(tag)); });
    while (!again_.empty() || (head_ != nullptr && !free_.empty())) {
      std::uint32_t index = 0;
      if (again_.empty()) {
        index = begin_request();
      } else {
        index = again_.back();
        again_.pop_back();
      }
      retire(index, slots_[index].read.finish());
    }
    ring_.pause();
  }

  Ring& ring_;
  UringOptions options_;
  RingBuffers<Ring> buffers_;
  std::string fixed_refusal_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> again_;  ///< to be pushed once more
  RingOperation* head_ = nullptr;     ///< the oldest read that is not wholly begun
  RingOperation* tail_ = nullptr;
  int failures_ = 0;  ///< submissions in a row
};

}  // namespace block_streamer::inline v1
