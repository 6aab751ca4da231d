// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/io/io_loop.hpp>
#include <block_streamer/io/progress_loop.hpp>
#include <block_streamer/pipeline/fetch_driver.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/pipeline/finisher.hpp>
#include <block_streamer/pipeline/options.hpp>
#include <block_streamer/pipeline/ordering_rules.hpp>
#include <block_streamer/pipeline/pipeline_shape.hpp>
#include <block_streamer/pipeline/shared_machine.hpp>
#include <block_streamer/pipeline/span_trace.hpp>
#include <block_streamer/pipeline/transfers.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/repeated_plan.hpp>
#include <block_streamer/plan/residency_planner.hpp>
#include <block_streamer/plan/visit_order.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/trace/residency_transition.hpp>
#include <block_streamer/trace/statistics.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Passes over blocks that stream through a bounded number of slots: plans each pass, gives
/// every visit its bytes and records its release. How the bytes get there is its FetchDriver's
/// part. Use it through `begin_pass`, then `acquire` once per visit; a Lease gives the part's bytes
/// until it is destroyed.
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
        trace_{backend_, options_.trace},
        driver_{backend_, storage_, shape_, *loop_, options_} {
    take_finisher_sizes(bound_sizes(finisher_.get()));
  }
  BlockPipeline(const BlockPipeline&) = delete;
  BlockPipeline& operator=(const BlockPipeline&) = delete;

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
    Machine& machine = driver_.machine();
    machine.rethrow_if_lost();
    driver_.open();
    machine.throw_if_failed();
    driver_.transfers().begin_pass(compute, machine.epoch() + 1);
    planner_.prepare(order, hint);
    PassPlan plan;
    {
      const auto locked = machine.lock();
      plan = planner_.plan(order, hint, locked->expected());
      locked->begin_pass(plan, reads());
      pass_running_ = true;
    }
    Pass pass{*this, std::move(plan.visits), compute};
    driver_.progress();
    return pass;
  }

  // ---- passes that a graph of the device does again and again; defined in recorded_pass.hpp
  /// @brief Why a pass cannot be recorded in a graph of the device; empty if it can.
  [[nodiscard]] std::string why_not_recorded() const;
  /// @brief Makes everything ready for a recording: what the plan keeps is brought to its slots.
  /// Waits until nothing is in flight. @returns what the recorded pass does.
  /// @param back_to  the pass returns from the end of the order to the part at this place of it.
  [[nodiscard]] RepeatedPlan prepare_recording(std::span<const PartId> order, Stream& compute,
                                               std::optional<std::size_t> back_to = {});
  /// @brief Begins the pass that is recorded: a pass like any other, whose operations on the device
  /// are recorded and not done. @pre prepare_recording() made the plan; nothing came between.
  [[nodiscard]] Pass begin_recording(const RepeatedPlan& plan, Stream& compute);
  /// @brief After the recording, well or not: nothing that it would have copied is resident, and
  /// nothing of it counts. @param failed  what was kept is not trusted either.
  void end_recording(const RepeatedPlan& plan, bool failed);
  /// @brief Does the recorded pass: `launch` enqueues the graph on `compute`, after everything that
  /// is in flight and before every later pass; statistics, history and observer see a pass. What
  /// the plan keeps is brought back first where it is not there any more.
  /// @pre opened() is what it was at the recording.
  template <class Launch>
  void replay(const RepeatedPlan& plan, Stream& compute, Launch&& launch);
  /// @brief How often device memory was taken: while it stays the same, slots keep their addresses.
  [[nodiscard]] std::uint64_t opened() const noexcept { return driver_.opened(); }

  /// @brief Waits until nothing is in flight, and where the timeline tells device time, until the
  /// device is past all of it. Prefetched blocks stay resident.
  void drain() {
    driver_.drain();
    if (!driver_.machine().lost()) trace_.drain();
  }
  /// @brief Forgets what is resident of these parts: the tier's bytes have changed, so the next
  /// visit fetches them anew. Waits for reads in flight, not for the device. @pre no pass runs.
  void forget(std::span<const PartId> parts) {
    expects(!pass_running_, "a pass is running: it must end before residencies are forgotten");
    driver_.machine().wait_quiet();
    driver_.machine().lock()->forget(parts);
  }
  /// @brief Counts bytes that left the device beside the passes: gradients.
  void count_copied_out(std::uint64_t byte_count) {
    driver_.machine().lock()->slots.statistics.bytes_copied_out += byte_count;
  }
  /// @brief Drains, evicts every block and gives device and staging memory back. The next pass
  /// takes them again.
  void close() {
    expects(!pass_running_, "a pass is running: it must end before close");
    drain();
    driver_.close();
  }
  /// @brief Closes; from now on visits see what another finisher makes of the bytes (null: the
  /// bytes). Statistics and history begin anew. After an exception the finisher is the one before.
  void change_finisher(std::unique_ptr<Finisher<Backend>> finisher) {
    auto sizes = bound_sizes(finisher.get());
    close();
    finisher_ = std::move(finisher);
    take_finisher_sizes(std::move(sizes));
    const auto machine = driver_.machine().lock();
    machine->slots.statistics.reset();
    machine->slots.history.clear();
  }
  [[nodiscard]] bool is_open() const noexcept { return driver_.is_open(); }

  [[nodiscard]] Statistics statistics() { return driver_.machine().lock()->slots.statistics; }
  void reset_statistics() { driver_.machine().lock()->slots.statistics.reset(); }
  /// @brief The last 4,096 transitions, oldest first.
  [[nodiscard]] std::vector<Transition> history() {
    return driver_.machine().lock()->slots.history.transitions();
  }
  [[nodiscard]] FetchMode mode() const noexcept { return shape_.mode; }
  [[nodiscard]] std::uint32_t slot_count() const noexcept { return shape_.transfer.slot_count; }
  [[nodiscard]] const TransferShape& shape() const noexcept { return shape_.transfer; }
  [[nodiscard]] const AnyStorage& storage() const noexcept { return storage_; }
  [[nodiscard]] Backend& backend() noexcept { return backend_; }
  [[nodiscard]] std::uint64_t staging_byte_count() const noexcept {
    return driver_.staging_byte_count();
  }

 private:
  using Machine = SharedMachine<Backend, Loop, Rules>;
  using TraceBegin = typename SpanTrace<Backend>::Begin;

  [[nodiscard]] auto reads() const noexcept {
    return [this](PartId part) -> const ReadPlan& { return shape_.reads_of(part); };
  }
  void hold(const SlotContents& kept, Stream& compute);

  // ---- finisher
  [[nodiscard]] std::vector<std::uint64_t> bound_sizes(const Finisher<Backend>* finisher) const {
    std::vector<std::uint64_t> sizes;
    for (std::size_t b = 0; finisher != nullptr && b < storage_.block_count(); ++b)
      sizes.push_back(finisher->bound_byte_count({block_at(b)}));
    return sizes;
  }
  void take_finisher_sizes(std::vector<std::uint64_t> sizes) noexcept {
    bound_byte_count_ = std::move(sizes);
    shape_.transfer.bound_byte_count =
        bound_byte_count_.empty() ? 0 : *std::ranges::max_element(bound_byte_count_);
  }

  void expects_blocks(std::span<const PartId> parts) const {
    for (const PartId part : parts)
      expects(index_of(part.block) < storage_.block_count() && part.part == 0,
              "a pass visits blocks that are stored");
  }

  // ---- visits
  [[nodiscard]] std::span<std::byte> begin_visit(const PlannedVisit& visit, Stream& compute) {
    driver_.wait_for(visit);
    driver_.machine().lock()->lease(visit);
    try {
      return bytes_of(visit, compute);
    } catch (...) {  // no lease will release it
      end_visit(visit, compute);
      throw;
    }
  }
  std::span<std::byte> bytes_of(const PlannedVisit& visit, Stream& compute) {
    const std::uint64_t wire_byte_count = shape_.reads_of(visit.part).slot_byte_count;
    const std::span<std::byte> wire = driver_.transfers().slot(visit.slot).first(wire_byte_count);
    wait_ready(visit, compute);
    if (finisher_) return finish(visit, wire, compute);
    touch(wire, Access::read, compute);
    return wire;
  }
  void wait_ready(const PlannedVisit& visit, Stream& compute) {
    if (shape_.mode == FetchMode::in_place || shape_.reads_of(visit.part).chunks.empty()) return;
    driver_.transfers().wait_ready(compute, visit.slot);
    if (!options_.computes_on_host) return;
    const Nanoseconds begin = backend_.now();
    driver_.transfers().synchronize_ready(visit.slot);
    const auto machine = driver_.machine().lock();
    machine->slots.statistics.device_wait_s +=
        std::chrono::duration<double>{backend_.now() - begin}.count();
  }
  std::span<std::byte> finish(const PlannedVisit& visit, std::span<std::byte> wire,
                              Stream& compute) {
    const std::span<std::byte> bound =
        driver_.transfers().bound().first(bound_byte_count_[index_of(visit.part.block)]);
    touch(wire, Access::read, compute);
    touch(bound, Access::write, compute);
    auto begin = trace_.begin_on(compute);
    finisher_->enqueue(visit.part, wire, bound, compute);
    trace_.end_on("convert", Lane::compute, visit.part, std::move(begin), bound.size(), compute);
    driver_.machine().lock()->slots.statistics.bytes_converted += bound.size();
    end_visit(visit, compute);  // the wire slot is free as soon as it is converted
    return bound;
  }
  void end_visit(const PlannedVisit& visit, Stream& compute, bool discarded = false) {
    try {
      driver_.transfers().record_release(compute, visit.slot);
    } catch (...) {  // told by whoever begins next; the visit is over all the same
      driver_.machine().failed_with(std::current_exception());
    }
    {
      const auto machine = driver_.machine().lock();
      machine->release(visit);
      if (discarded) machine->slots.clear(visit.slot, machine->epoch());
    }
    driver_.progress();
  }
  void end_pass(Stream& compute) noexcept {
    try {
      driver_.transfers().end_pass(compute);
    } catch (...) {
      driver_.machine().failed_with(std::current_exception());
    }
    {
      const auto machine = driver_.machine().lock();
      machine->end_pass();
      pass_running_ = false;
    }
    driver_.progress();  // what stays queued is for the next pass, and drains without the caller
  }
  void touch(std::span<const std::byte> bytes, Access access, Stream& compute) noexcept {
    options_.computes_on_host ? backend_.touch_on_host(bytes, access)
                              : backend_.touch_on_stream(bytes, access, compute);
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
  SpanTrace<Backend> trace_;
  bool pass_running_ = false;                 // the visitor's
  Statistics before_recording_;               // the visitor's
  FetchDriver<Backend, Loop, Rules> driver_;  // last: its destructor waits for what uses the rest
};

}  // namespace block_streamer::inline v1
