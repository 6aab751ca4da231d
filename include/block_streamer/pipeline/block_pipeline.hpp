// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/host_edges.hpp>
#include <block_streamer/io/io_loop.hpp>
#include <block_streamer/io/progress_loop.hpp>
#include <block_streamer/pipeline/failure.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/pipeline/finisher.hpp>
#include <block_streamer/pipeline/options.hpp>
#include <block_streamer/pipeline/ordering_rules.hpp>
#include <block_streamer/pipeline/pipeline_shape.hpp>
#include <block_streamer/pipeline/transfers.hpp>
#include <block_streamer/pipeline/visible_lock.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/residency_planner.hpp>
#include <block_streamer/plan/visit_order.hpp>
#include <block_streamer/storage/any_storage.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The shell around FetchMachine: gives it a mutex, a backend, a storage tier and a loop.
/// Use it through `begin_pass`, then `acquire` once per visit; a Lease gives the part's bytes until
/// it is destroyed.
/// **Threads.** One visitor at a time (any thread; externally synchronised; a second pass while one
/// runs is refused); one loop thread; completions of the tier and the backend from any thread.
/// **Errors.** The first failure of a read, copy or device is thrown once, by the next acquire or
/// begin_pass; the pipeline is usable afterwards, except after a sticky device error.
/// **Lifetime.** Not movable: operations in flight point to it. The destructor waits for all of
/// them.
template <execution_backend Backend, progress_loop Loop = IoLoop, class Rules = AllOrderingRules>
class BlockPipeline {
 public:
  using Stream = typename Backend::Stream;
  class Pass;
  class Lease;

  /// @throws ContractViolation for options out of range, Error if a block exceeds the slot budget.
  BlockPipeline(AnyStorage storage, Backend backend, const PipelineOptions& options,
                std::unique_ptr<Finisher<Backend>> finisher = nullptr,
                std::unique_ptr<Loop> loop = std::make_unique<Loop>())
      : backend_{std::move(backend)},
        storage_{std::move(storage)},
        options_{options},
        finisher_{std::move(finisher)},
        loop_{std::move(loop)},
        shape_{storage_, backend_, options_, registrations_},
        planner_{
            shape_.space, {shape_.prefetch_ahead, options_.prefetch_next_pass}, options_.costs},
        machine_{shape_.mode, shape_.transfer.slot_count, shape_.transfer.ticket_count,
                 options_.observer} {
    inbox_.reserve(2 * std::size_t{shape_.transfer.ticket_count});
    read_begin_.resize(shape_.transfer.ticket_count);
    if (finisher_) {
      for (std::size_t b = 0; b < storage_.block_count(); ++b) {
        bound_byte_count_.push_back(finisher_->bound_byte_count({block_at(b)}));
        shape_.transfer.bound_byte_count =
            std::max(shape_.transfer.bound_byte_count, bound_byte_count_.back());
      }
    }
  }
  BlockPipeline(const BlockPipeline&) = delete;
  BlockPipeline& operator=(const BlockPipeline&) = delete;
  ~BlockPipeline() {
    wait_quiet();
    try {
      if (transfers_) transfers_->synchronize_copies();
    } catch (...) {  // a lost device has nothing in flight
    }
    if (transfers_) storage_.forget(transfers_->staging());
  }

  /// @brief Begins a pass over `order`, planned from what is resident now.
  /// @param hint     what is expected to follow (see plan_pass).
  /// @param compute  the stream that the pass's visits compute on; alive until the pass ends.
  /// @throws ContractViolation if a pass is running; DeviceError after a sticky device error; what
  /// failed since the last acquire (a prefetch, a release): it is told once, whenever it happened.
  [[nodiscard]] Pass begin_pass(std::span<const PartId> order, std::span<const PartId> hint,
                                Stream& compute) {
    expects(!pass_running_,
            "a pass is running: calls must not overlap, nor come from inside a block");
    expects_blocks(order);
    expects_blocks(hint);
    {
      Guard guard{mutex_, backend_};
      failure_.rethrow_if_lost();
    }
    open();
    throw_if_failed();
    transfers_->begin_pass(compute, machine_.epoch() + 1);
    planner_.prepare(order, hint);
    PassPlan plan;
    {
      Guard guard{mutex_, backend_};
      plan = planner_.plan(order, hint, machine_.expected());
      machine_.begin_pass(plan,
                          [this](PartId part) -> const ReadPlan& { return shape_.reads_of(part); });
      pass_running_ = true;
    }
    Pass pass{*this, std::move(plan.visits), compute};
    progress();
    return pass;
  }

  /// @brief Waits until nothing is in flight. Prefetched blocks stay resident.
  void drain() {
    wait_quiet();
    if (transfers_ && !failure_.lost()) transfers_->synchronize_copies();
  }
  /// @brief Forgets what is resident of these parts: the tier's bytes have changed, so the next
  /// visit fetches them anew. Waits for reads in flight, not for the device. @pre no pass runs.
  void forget(std::span<const PartId> parts) {
    expects(!pass_running_, "a pass is running: it must end before residencies are forgotten");
    wait_quiet();
    Guard guard{mutex_, backend_};
    machine_.forget(parts);
  }
  /// @brief Counts bytes that left the device beside the passes: gradients.
  void count_copied_out(std::uint64_t byte_count) {
    Guard guard{mutex_, backend_};
    machine_.slots.statistics.bytes_copied_out += byte_count;
  }
  /// @brief Drains, evicts every block and gives device and staging memory back. The next pass
  /// takes them again.
  void close() {
    expects(!pass_running_, "a pass is running: it must end before close");
    drain();
    if (transfers_) storage_.forget(transfers_->staging());
    Guard guard{mutex_, backend_};
    if (machine_.failed()) machine_.reset_failure();
    failure_.clear();
    machine_.evict_all();
    machine_.slots.statistics.bound_bytes = 0;
    transfers_.reset();
  }
  /// @brief The tier, for another pipeline. @pre close() was called; this pipeline is not used
  /// again.
  [[nodiscard]] AnyStorage take_storage() {
    expects(!is_open(), "the storage of an open pipeline is in use");
    registrations_.clear();
    return std::move(storage_);
  }
  [[nodiscard]] bool is_open() const noexcept { return transfers_.has_value(); }

  [[nodiscard]] Statistics statistics() {
    Guard guard{mutex_, backend_};
    return machine_.slots.statistics;
  }
  void reset_statistics() {
    Guard guard{mutex_, backend_};
    machine_.slots.statistics.reset();
  }
  /// @brief The last 4,096 transitions, oldest first.
  [[nodiscard]] std::vector<Transition> history() {
    Guard guard{mutex_, backend_};
    return machine_.slots.history.transitions();
  }
  [[nodiscard]] FetchMode mode() const noexcept { return shape_.mode; }
  [[nodiscard]] std::uint32_t slot_count() const noexcept { return shape_.transfer.slot_count; }
  [[nodiscard]] const TransferShape& shape() const noexcept { return shape_.transfer; }
  [[nodiscard]] const AnyStorage& storage() const noexcept { return storage_; }
  [[nodiscard]] Backend& backend() noexcept { return backend_; }
  [[nodiscard]] std::uint64_t staging_byte_count() const noexcept {
    return transfers_ ? transfers_->staging_byte_count() : 0;
  }

 private:
  using Guard = VisibleLock<Backend>;
  enum class What : std::uint8_t { arrived, drained };
  struct Message {
    What what;
    std::uint32_t ticket;
  };

  void expects_blocks(std::span<const PartId> parts) const {
    for (const PartId part : parts)
      expects(index_of(part.block) < storage_.block_count() && part.part == 0,
              "a pass visits blocks that are stored");
  }
  void open() {
    if (transfers_) return;
    transfers_.emplace(backend_, shape_.transfer);
    if (!transfers_->staging().empty()) storage_.prepare(transfers_->staging());
    Guard guard{mutex_, backend_};
    machine_.slots.statistics.bound_bytes = transfers_->bound().size();
  }
  [[nodiscard]] bool visitor_copies() const noexcept {
    return shape_.mode == FetchMode::addressed && Rules::visitor_copies_ram;
  }

  // ---- progress: on the visitor for a tier in RAM, on the loop otherwise, never on both
  void progress() {
    if (visitor_copies()) return pump();
    Guard guard{mutex_, backend_};
    schedule();
  }
  /// @pre the mutex is held.
  void schedule() {
    if (std::exchange(pump_scheduled_, true)) return;
    loop_->post([](void* self) noexcept { static_cast<BlockPipeline*>(self)->pump(); }, this);
  }
  void pump() noexcept {
    while (const auto action = decide()) perform(*action);
  }
  /// The next thing to do; nullopt once there is nothing, and the next event will schedule the pump
  /// again.
  [[nodiscard]] std::optional<FetchAction> decide() noexcept {
    try {
      Guard guard{mutex_, backend_};
      take_messages();
      auto action = machine_.next();
      pump_scheduled_ = action.has_value();
      return action;
    } catch (...) {  // an impossible move: a broken rule is reported, not obeyed
      Guard guard{mutex_, backend_};
      failure_.set(std::current_exception());
      machine_.fail();
      pump_scheduled_ = false;
      if (!inbox_.empty()) schedule();
      return std::nullopt;
    }
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
      failed_with(std::current_exception());
      if (shape_.mode == FetchMode::staged) abandon_copy(action.ticket);
    }
  }
  /// The copies issued before the one that failed still read the chunk: it is free after them.
  void abandon_copy(std::uint32_t ticket) noexcept {
    try {
      transfers_->wait_for_copies();
    } catch (...) {  // a device that cannot even wait has nothing in flight
    }
    deliver(What::drained, ticket);
  }
  void start_read(const FetchAction& action) noexcept {
    const Chunk& chunk = action.reads->chunks[action.chunk];
    const std::span<std::byte> out = destination(action, chunk);
    if (options_.trace.enabled()) read_begin_[action.ticket] = backend_.now();
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
  void read_ended(const FetchAction& action, std::error_code error) noexcept {
    const Chunk& chunk = action.reads->chunks[action.chunk];
    accept_host_edge(backend_, &read_begin_[action.ticket]);
    backend_.touch_on_host(destination(action, chunk), Access::write);
    trace("read", Lane::storage, action.part, read_begin_[action.ticket], chunk.image.byte_count);
    if (error) failed_with(read_failure(storage_, action.part.block, chunk.image, error));
    deliver(What::arrived, action.ticket);
  }
  void copy_chunk(const FetchAction& action) {
    const Nanoseconds begin = trace_time();
    transfers_->copy_chunk(action);
    {
      Guard guard{mutex_, backend_};
      machine_.copied(action.ticket);
    }
    transfers_->notify_drained(action.ticket,
                               [this, action, begin](std::error_code error, std::size_t) {
                                 if (error) copy_failed(action, error);
                                 trace("copy", Lane::copy_in, action.part, begin,
                                       action.reads->chunks[action.chunk].image.byte_count);
                                 deliver(What::drained, action.ticket);
                               });
  }
  /// The device reported a failure, so nothing that it was to copy is to be trusted.
  void copy_failed(const FetchAction& action, std::error_code error) noexcept {
    failed_with(std::make_exception_ptr(DeviceError{
        backend_.name() + ": copying " + to_string(action.part) + " failed: " + error.message(),
        error.value()}));
    Guard guard{mutex_, backend_};
    slots_suspect_ = true;
  }
  void copy_all(const FetchAction& action) {
    const Nanoseconds begin = trace_time();
    transfers_->copy_all(action, storage_.bytes(action.part.block));
    trace("copy", Lane::copy_in, action.part, begin, action.reads->needed_byte_count);
    Guard guard{mutex_, backend_};
    if (shape_.mode == FetchMode::addressed) return machine_.copied_all(action.slot);
    machine_.copied(action.ticket);
    machine_.drained(action.ticket);  // its source is there to stay
  }

  // ---- messages from any thread
  void deliver(What what, std::uint32_t ticket) noexcept {
    Guard guard{mutex_, backend_};
    inbox_.push_back({what, ticket});
    schedule();
  }
  /// @pre the mutex is held.
  void take_messages() {
    std::size_t taken = 0;
    try {
      while (taken < inbox_.size()) take(inbox_[taken++]);
    } catch (...) {  // one that the machine refuses does not take the others with it
      inbox_.erase(inbox_.begin(), inbox_.begin() + static_cast<std::ptrdiff_t>(taken));
      throw;
    }
    inbox_.clear();
  }
  void take(const Message& message) {
    message.what == What::arrived ? machine_.arrived(message.ticket)
                                  : machine_.drained(message.ticket);
  }
  void failed_with(std::exception_ptr cause) noexcept {
    Guard guard{mutex_, backend_};
    failure_.set(std::move(cause));
    machine_.fail();
  }
  /// The first cause, once; the pipeline is usable again when it is thrown.
  void throw_if_failed() {
    std::exception_ptr cause;
    {
      Guard guard{mutex_, backend_};
      if (!machine_.failed()) return;
      cause = failure_.cause();
    }
    recover();
    std::rethrow_exception(cause);
  }

  // ---- waiting, on the visitor
  struct VisitWait {
    BlockPipeline* self;
    const PlannedVisit* visit;
  };
  void wait_usable(const PlannedVisit& visit) {
    VisitWait wait{this, &visit};
    const auto usable = [](void* context) {
      const auto& w = *static_cast<VisitWait*>(context);
      Guard guard{w.self->mutex_, w.self->backend_};
      return w.self->machine_.usable(*w.visit) || w.self->machine_.failed();
    };
    if (usable(&wait)) return;
    const Nanoseconds begin = backend_.now();
    loop_->wait_until(usable, &wait);
    Guard guard{mutex_, backend_};
    machine_.slots.statistics.storage_wait_s += seconds(backend_.now() - begin);
  }
  void wait_quiet() noexcept {
    loop_->wait_until(
        [](void* context) {
          auto& self = *static_cast<BlockPipeline*>(context);
          Guard guard{self.mutex_, self.backend_};
          return self.machine_.idle() && !self.pump_scheduled_;
        },
        this);
  }
  /// After a failure: nothing is in flight any more, and the failed fetches are forgotten.
  void recover() {
    wait_quiet();
    Guard guard{mutex_, backend_};
    machine_.reset_failure();
    if (std::exchange(slots_suspect_, false)) machine_.evict_all();
    failure_.clear();
  }

  // ---- visits
  [[nodiscard]] std::span<std::byte> begin_visit(const PlannedVisit& visit, Stream& compute) {
    if (visitor_copies()) pump();
    wait_usable(visit);
    throw_if_failed();
    {
      Guard guard{mutex_, backend_};
      machine_.lease(visit);
    }
    try {
      return bytes_of(visit, compute);
    } catch (...) {  // no lease will release it
      end_visit(visit, compute);
      throw;
    }
  }
  std::span<std::byte> bytes_of(const PlannedVisit& visit, Stream& compute) {
    const std::uint64_t wire_byte_count = shape_.reads_of(visit.part).slot_byte_count;
    const std::span<std::byte> wire = transfers_->slot(visit.slot).first(wire_byte_count);
    wait_ready(visit, compute);
    if (finisher_) return finish(visit, wire, compute);
    touch(wire, Access::read, compute);
    return wire;
  }
  void wait_ready(const PlannedVisit& visit, Stream& compute) {
    if (shape_.mode == FetchMode::in_place || shape_.reads_of(visit.part).chunks.empty()) return;
    transfers_->wait_ready(compute, visit.slot);
    if (!options_.computes_on_host) return;
    const Nanoseconds begin = backend_.now();
    transfers_->synchronize_ready(visit.slot);
    Guard guard{mutex_, backend_};
    machine_.slots.statistics.device_wait_s += seconds(backend_.now() - begin);
  }
  std::span<std::byte> finish(const PlannedVisit& visit, std::span<std::byte> wire,
                              Stream& compute) {
    const std::span<std::byte> bound =
        transfers_->bound().first(bound_byte_count_[index_of(visit.part.block)]);
    touch(wire, Access::read, compute);
    touch(bound, Access::write, compute);
    const Nanoseconds begin = trace_time();
    finisher_->enqueue(visit.part, wire, bound, compute);
    trace("convert", Lane::compute, visit.part, begin, bound.size());
    {
      Guard guard{mutex_, backend_};
      machine_.slots.statistics.bytes_converted += bound.size();
    }
    end_visit(visit, compute);  // the wire slot is free as soon as it is converted
    return bound;
  }
  void end_visit(const PlannedVisit& visit, Stream& compute, bool discarded = false) {
    try {
      transfers_->record_release(compute, visit.slot);
    } catch (...) {  // told by whoever begins next; the visit is over all the same
      failed_with(std::current_exception());
    }
    {
      Guard guard{mutex_, backend_};
      machine_.release(visit);
      if (discarded) machine_.slots.clear(visit.slot, machine_.epoch());
    }
    progress();
  }
  void end_pass(Stream& compute) noexcept {
    try {
      transfers_->end_pass(compute);
    } catch (...) {
      failed_with(std::current_exception());
    }
    {
      Guard guard{mutex_, backend_};
      machine_.end_pass();
      pass_running_ = false;
    }
    progress();  // what stays queued is for the next pass, and drains without the caller
  }
  void touch(std::span<const std::byte> bytes, Access access, Stream& compute) noexcept {
    options_.computes_on_host ? backend_.touch_on_host(bytes, access)
                              : backend_.touch_on_stream(bytes, access, compute);
  }

  [[nodiscard]] Nanoseconds trace_time() const noexcept {
    return options_.trace.enabled() ? backend_.now() : Nanoseconds::zero();
  }
  void trace(std::string_view name, Lane lane, PartId part, Nanoseconds begin,
             std::uint64_t bytes) noexcept {
    if (options_.trace.enabled())
      options_.trace.record({name, lane, 0, part, begin, backend_.now(), bytes});
  }
  [[nodiscard]] static double seconds(Nanoseconds time) noexcept {
    return std::chrono::duration<double>(time).count();
  }

  Backend backend_;
  AnyStorage storage_;
  PipelineOptions options_;
  std::unique_ptr<Finisher<Backend>> finisher_;
  std::vector<std::uint64_t> bound_byte_count_;  ///< per block, if there is a finisher
  std::unique_ptr<Loop> loop_;
  std::vector<typename Backend::HostRegistration> registrations_;
  PipelineShape shape_;
  ResidencyPlanner planner_;  // the visitor's
  std::optional<Transfers<Backend>> transfers_;

  std::mutex mutex_;  // guards everything below, but for pass_running_, which is the visitor's
  FetchMachine<Rules> machine_;
  Failure failure_;
  std::vector<Message> inbox_;
  bool pump_scheduled_ = false;
  bool slots_suspect_ = false;  ///< a copy failed on the device after it was issued
  bool pass_running_ = false;
  std::vector<Nanoseconds> read_begin_;  ///< per ticket; written before the read, read after it
};

}  // namespace block_streamer::inline v1
