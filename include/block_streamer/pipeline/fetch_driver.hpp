// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/host_edges.hpp>
#include <block_streamer/io/progress_loop.hpp>
#include <block_streamer/pipeline/failure.hpp>
#include <block_streamer/pipeline/fetch_inbox.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/pipeline/options.hpp>
#include <block_streamer/pipeline/pipeline_shape.hpp>
#include <block_streamer/pipeline/shared_machine.hpp>
#include <block_streamer/pipeline/span_trace.hpp>
#include <block_streamer/pipeline/transfers.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/storage/any_storage.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Does what a FetchMachine says: performs its actions on tier and device and brings it what
/// became of them. Knows fetches; of visits only how to wait for one's bytes.
/// **Threads.** The public functions: the visitor, one at a time. Completions of the tier and the
/// backend: any thread. Actions are performed by one thread: the visitor for a tier in RAM, the
/// loop otherwise.
/// **Errors.** What fails in an action stops the granting; the first cause is thrown once, by
/// `wait_for` or `machine().throw_if_failed()`.
/// **Cost.** No allocation a fetch.
/// **Lifetime.** Not movable: operations in flight and tasks of the loop point to it. The
/// destructor waits for them; everything that the constructor is given outlives it.
template <execution_backend Backend, progress_loop Loop, class Rules>
class FetchDriver {
 public:
  using Machine = SharedMachine<Backend, Loop, Rules>;

  FetchDriver(Backend& backend, AnyStorage& storage, const PipelineShape& shape, Loop& loop,
              const PipelineOptions& options)
      : backend_{backend},
        storage_{storage},
        shape_{shape},
        trace_{backend, options.trace},
        machine_{backend,
                 loop,
                 shape,
                 options.observer,
                 {[](void* self) noexcept { static_cast<FetchDriver*>(self)->pump(); }, this}},
        read_begin_(shape.transfer.ticket_count) {}
  FetchDriver(const FetchDriver&) = delete;
  FetchDriver& operator=(const FetchDriver&) = delete;
  ~FetchDriver() {
    machine_.wait_quiet();
    try {
      if (transfers_) transfers_->synchronize_copies();
    } catch (...) {  // a lost device has nothing in flight
    }
    if (transfers_) storage_.forget(transfers_->staging());
  }

  /// @brief Takes device and staging memory, if it has none.
  /// @throws DeviceError, StorageError if the memory cannot be had.
  void open() {
    if (transfers_) return;
    transfers_.emplace(backend_, shape_.transfer);
    if (!transfers_->staging().empty()) storage_.prepare(transfers_->staging());
    ++opened_;
    machine_.lock()->slots.statistics.bound_bytes = transfers_->bound().size();
  }
  /// @brief Waits until nothing is in flight.
  /// @throws DeviceError
  void drain() {
    machine_.wait_quiet();
    if (!transfers_ || machine_.lost()) return;
    transfers_->synchronize_copies();
    trace_.drain();
  }
  /// @brief Drains, evicts every block, forgets a failure and gives the memory back.
  /// @pre no pass runs.
  void close() {
    drain();
    if (transfers_) storage_.forget(transfers_->staging());
    const auto machine = machine_.lock();
    machine.clear();
    machine->slots.statistics.bound_bytes = 0;
    transfers_.reset();
  }
  /// @brief Whether copies leave no spans of device time: they are recorded, not done.
  void pause_trace(bool on) noexcept { trace_.pause(on); }
  [[nodiscard]] bool is_open() const noexcept { return transfers_.has_value(); }
  /// @brief How often memory was taken: while it stays the same, addresses do.
  [[nodiscard]] std::uint64_t opened() const noexcept { return opened_; }
  [[nodiscard]] std::uint64_t staging_byte_count() const noexcept {
    return transfers_ ? transfers_->staging_byte_count() : 0;
  }
  /// @pre is_open().
  [[nodiscard]] Transfers<Backend>& transfers() noexcept { return *transfers_; }
  [[nodiscard]] Machine& machine() noexcept { return machine_; }

  /// @brief After events of the visitor: performs what they made possible, or has the loop do it.
  void progress() {
    if (visitor_copies()) return pump();
    machine_.schedule_pump();
  }
  /// @brief Returns once the visit's part is in its slot to stay.
  /// @throws StorageError, DeviceError: the first failure since the last time.
  void wait_for(const PlannedVisit& visit) {
    if (visitor_copies()) pump();
    machine_.wait_usable(visit);
    machine_.throw_if_failed();
  }

 private:
  [[nodiscard]] bool visitor_copies() const noexcept {
    return shape_.mode == FetchMode::addressed && Rules::visitor_copies_ram;
  }

  // ---- on the visitor for a tier in RAM, on the loop otherwise, never on both
  void pump() noexcept {
    while (const auto action = machine_.next_action()) perform(*action);
  }
  void perform(const FetchAction& action) noexcept {
    try {
      switch (action.kind) {
        case FetchAction::Kind::read:
          return start_read(action);
        case FetchAction::Kind::copy:
          return copy_chunk(action);
        case FetchAction::Kind::copy_all:
          return copy_all(action);
      }
    } catch (...) {
      machine_.failed_with(std::current_exception());
      if (shape_.mode == FetchMode::staged) abandon_copy(action.ticket);
    }
  }
  /// The copies issued before the one that failed still read the chunk: it is free after them.
  void abandon_copy(std::uint32_t ticket) noexcept {
    try {
      transfers_->wait_for_copies();
    } catch (...) {  // a device that cannot even wait has nothing in flight
    }
    machine_.deliver(FetchEvent::drained, ticket);
  }
  void start_read(const FetchAction& action) noexcept {
    const Chunk& chunk = action.reads->chunks[action.chunk];
    const std::span<std::byte> out = destination(action, chunk);
    if (trace_.enabled()) read_begin_[action.ticket] = backend_.now();
    publish_host_edge(backend_,
                      &read_begin_[action.ticket]);  // whoever completes the read comes after this
    storage_.async_read(
        action.part.block, chunk.image, out,
        [this, action](std::error_code error, std::size_t) { read_ended(action, error); });
  }
  [[nodiscard]] std::span<std::byte> destination(const FetchAction& action,
                                                 const Chunk& chunk) const noexcept {
    if (shape_.mode == FetchMode::staged) {
      return transfers_->chunk(action.ticket).first(chunk.image.byte_count);
    }
    const CopyPiece& piece = action.reads->pieces_of(chunk).front();
    return transfers_->slot(action.slot).subspan(piece.slot_offset, piece.byte_count);
  }
  void copy_chunk(const FetchAction& action) {
    const std::uint64_t byte_count = action.reads->chunks[action.chunk].image.byte_count;
    auto begin = trace_.begin_on(transfers_->copy_stream());
    transfers_->copy_chunk(action);
    const Nanoseconds from = begin.host;
    if constexpr (SpanTrace<Backend>::tells_device_time) {
      trace_.end_on("copy", Lane::copy_in, action.part, std::move(begin), byte_count,
                    transfers_->copy_stream());
    }
    machine_.lock()->copied(action.ticket);
    transfers_->notify_drained(
        action.ticket, [this, action, from, byte_count](std::error_code error, std::size_t) {
          if (error) copy_failed(action, error);
          if constexpr (!SpanTrace<Backend>::tells_device_time)
            trace_.end("copy", Lane::copy_in, action.part, from, byte_count);
          machine_.deliver(FetchEvent::drained, action.ticket);
        });
  }
  void copy_all(const FetchAction& action) {
    auto begin = trace_.begin_on(transfers_->copy_stream());
    transfers_->copy_all(action, storage_.bytes(action.part.block));
    trace_.end_on("copy", Lane::copy_in, action.part, std::move(begin),
                  action.reads->needed_byte_count, transfers_->copy_stream());
    const auto machine = machine_.lock();
    if (shape_.mode == FetchMode::addressed) return machine->copied_all(action.slot);
    machine->copied(action.ticket);
    machine->drained(action.ticket);  // its source is there to stay
  }

  // ---- on any thread
  void read_ended(const FetchAction& action, std::error_code error) noexcept {
    const Chunk& chunk = action.reads->chunks[action.chunk];
    accept_host_edge(backend_, &read_begin_[action.ticket]);
    backend_.touch_on_host(destination(action, chunk), Access::write);
    trace_.end("read", Lane::storage, action.part, read_begin_[action.ticket],
               chunk.image.byte_count);
    if (error) machine_.failed_with(read_failure(storage_, action.part.block, chunk.image, error));
    machine_.deliver(FetchEvent::arrived, action.ticket);
  }
  /// The device reported a failure, so nothing that it was to copy is to be trusted.
  void copy_failed(const FetchAction& action, std::error_code error) noexcept {
    machine_.failed_with(std::make_exception_ptr(DeviceError{
        backend_.name() + ": copying " + to_string(action.part) + " failed: " + error.message(),
        error.value()}));
    machine_.suspect_slots();
  }

  Backend& backend_;
  AnyStorage& storage_;
  const PipelineShape& shape_;
  SpanTrace<Backend> trace_;
  std::optional<Transfers<Backend>> transfers_;
  std::uint64_t opened_ = 0;
  Machine machine_;
  std::vector<Nanoseconds> read_begin_;  ///< per ticket; written before the read, read after it
};

}  // namespace block_streamer::inline v1
