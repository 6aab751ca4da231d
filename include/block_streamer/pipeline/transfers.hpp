// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/pipeline/arena.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/pipeline/staging_ring.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// What the memory of a pipeline consists of.
struct TransferShape {
  std::uint32_t slot_count = 0;
  std::uint64_t slot_byte_count = 0;            ///< of the largest
  std::vector<std::uint64_t> slot_byte_counts;  ///< of each
  std::uint64_t bound_byte_count = 0;
  std::uint32_t ticket_count = 0;
  std::uint64_t chunk_byte_count = 0;    ///< of a staging chunk; 0: no staging
  std::uint32_t memory_block_count = 0;  ///< blocks that the tier has in memory
  std::uint32_t locked_block_count = 0;  ///< of those, page-locked: copied from where they are
};

/// @brief Device memory, staging, the copy stream and all events of a pipeline, and the operations
/// on them. Decides nothing.
/// **Threads.** The copy operations: one enqueuing thread at a time (the visitor, or the I/O loop).
/// The others: the visitor.
template <execution_backend Backend>
class Transfers {
 public:
  using Stream = typename Backend::Stream;
  using Event = typename Backend::Event;

  Transfers(Backend& backend, const TransferShape& shape)
      : backend_{backend},
        arena_{backend, shape.slot_byte_counts, shape.bound_byte_count},
        copy_{backend.make_stream()},
        forks_{backend.make_event(), backend.make_event()},
        pass_end_{backend.make_event()},
        joined_{backend.make_event()},
        copied_(shape.slot_count, false) {
    if (shape.chunk_byte_count > 0) {
      staging_.emplace(backend, shape.ticket_count, shape.chunk_byte_count);
      for (std::uint32_t i = 0; i < shape.ticket_count; ++i)
        drained_.push_back(backend.make_event());
    }
    for (std::uint32_t i = 0; i < shape.slot_count; ++i) {
      ready_.push_back(backend.make_event());
      released_.push_back(backend.make_event());
    }
  }

  [[nodiscard]] std::span<std::byte> slot(std::uint32_t index) const noexcept {
    return arena_.slot(index);
  }
  [[nodiscard]] std::span<std::byte> bound() const noexcept { return arena_.bound(); }
  [[nodiscard]] std::span<std::byte> chunk(std::uint32_t ticket) const noexcept {
    return staging_->chunk(ticket);
  }
  [[nodiscard]] std::uint64_t device_byte_count() const noexcept { return arena_.byte_count(); }
  /// @brief All chunks together; empty without staging.
  [[nodiscard]] std::span<std::byte> staging() const noexcept {
    return staging_ ? staging_->bytes() : std::span<std::byte>{};
  }
  /// @brief Where copies to the slots are enqueued.
  [[nodiscard]] Stream& copy_stream() noexcept { return copy_; }
  [[nodiscard]] std::uint64_t staging_byte_count() const noexcept {
    return staging_ ? staging_->byte_count() : 0;
  }

  /// @brief The pass may use what earlier passes computed with, and none of its own copies
  /// overwrites anything before they did.
  void begin_pass(Stream& compute, std::uint64_t epoch) {
    // The caller may have changed streams.
    if (pass_ended_ && !recording_) backend_.wait(compute, pass_end_);
    backend_.record(fork_of(epoch), compute);
  }
  void end_pass(Stream& compute) {
    backend_.record(pass_end_, compute);
    pass_ended_ = true;
  }

  void wait_ready(Stream& compute, std::uint32_t slot) {
    if (recording_ && !copied_[slot]) return;  // there before, and not to be waited for in a graph
    backend_.wait(compute, ready_[slot]);
  }
  void synchronize_ready(std::uint32_t slot) { backend_.synchronize(ready_[slot]); }
  void record_release(Stream& compute, std::uint32_t slot) {
    backend_.record(released_[slot], compute);
  }

  /// @brief Issues the copies of one staged chunk; `drained` is called when the chunk may be
  /// refilled.
  void copy_chunk(const FetchAction& action) {
    order_copy(action);
    const Chunk& chunk = action.reads->chunks[action.chunk];
    copy_pieces(action, chunk, staging_->chunk(action.ticket));
    backend_.record(drained_[action.ticket], copy_);
    if (action.last) backend_.record(ready_[action.slot], copy_);
  }
  void notify_drained(std::uint32_t ticket, IoCompletion drained) {
    backend_.notify(drained_[ticket], std::move(drained));
  }
  /// @brief Issues all copies of a part whose image is in page-locked memory.
  void copy_all(const FetchAction& action, std::span<const std::byte> image) {
    order_copy(action);
    for (const Chunk& chunk : action.reads->chunks) {
      copy_pieces(action, chunk, image.subspan(chunk.image.offset, chunk.image.byte_count));
    }
    backend_.record(ready_[action.slot], copy_);
    copied_[action.slot] = true;
  }

  // ---- recording a pass into a graph of the device
  /// @brief Until end_recording(), everything that is enqueued is recorded and not done: what was
  /// before is not waited for. @pre everything issued so far has been passed.
  void begin_recording() {
    recording_ = true;
    copied_.assign(copied_.size(), false);
  }
  /// @brief Events that were recorded in a graph mean nothing outside of it: others take their
  /// place.
  void end_recording() {
    recording_ = false;
    pass_ended_ = false;
    for (Event& ready : ready_) backend_.record(ready, copy_);
  }
  /// @brief `compute` comes after everything issued so far.
  void join(Stream& compute) {
    if (pass_ended_) backend_.wait(compute, pass_end_);
    if (std::find(copied_.begin(), copied_.end(), true) == copied_.end()) return;
    backend_.record(joined_, copy_);
    backend_.wait(compute, joined_);
    copied_.assign(copied_.size(), false);
  }

  /// @brief Waits on the host until every copy issued so far has been passed. The enqueuing
  /// thread's.
  void wait_for_copies() {
    Event event = backend_.make_event();
    backend_.record(event, copy_);
    backend_.synchronize(event);
  }
  /// @brief Waits on the host until everything issued so far has been passed.
  void synchronize_copies() {
    wait_for_copies();
    if (pass_ended_) backend_.synchronize(pass_end_);
  }

 private:
  /// Two, because what a pass fetches ahead for the next may be copied only after that has begun.
  /// Whoever is later still waits for more than it has to, but never for a visit that needs it.
  [[nodiscard]] Event& fork_of(std::uint64_t epoch) noexcept { return forks_[epoch % 2]; }
  void order_copy(const FetchAction& action) {
    if (action.fork_of_epoch != 0) backend_.wait(copy_, fork_of(action.fork_of_epoch));
    if (action.wait_for_release) backend_.wait(copy_, released_[action.slot]);
  }
  void copy_pieces(const FetchAction& action, const Chunk& chunk,
                   std::span<const std::byte> source) {
    const std::span<std::byte> slot = arena_.slot(action.slot);
    for (const CopyPiece& piece : action.reads->pieces_of(chunk)) {
      backend_.copy_async(slot.subspan(piece.slot_offset, piece.byte_count),
                          source.subspan(piece.chunk_offset, piece.byte_count),
                          CopyDirection::host_to_device, copy_);
    }
  }

  Backend backend_;
  Arena<Backend> arena_;
  std::optional<StagingRing<Backend>> staging_;
  Stream copy_;
  std::array<Event, 2> forks_;  ///< of two passes: everything before was computed
  Event pass_end_;
  Event joined_;                 ///< the copies that a graph comes after
  std::vector<Event> ready_;     ///< per slot: its bytes are there
  std::vector<Event> released_;  ///< per slot: its latest visit is over
  std::vector<Event> drained_;   ///< per staging chunk: it may be refilled
  bool pass_ended_ = false;      ///< pass_end_ was recorded
  bool recording_ = false;       ///< into a graph
  std::vector<bool> copied_;     ///< per slot: since a recording began, or a graph was joined
};

}  // namespace block_streamer::inline v1
