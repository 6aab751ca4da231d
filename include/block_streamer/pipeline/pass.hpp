// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/pipeline/block_pipeline.hpp>

namespace block_streamer::inline v1 {

/// @brief The bytes of one visit, until destroyed; then the release is recorded on the compute
/// stream, on every path.
/// **Threads.** The visitor's. **Lifetime.** Ends before the next acquire; with its pass at the
/// latest, and its bytes are nobody's then. Pass and lease may be moved while the other lives.
template <execution_backend Backend, progress_loop Loop, class Rules>
class BlockPipeline<Backend, Loop, Rules>::Lease {
 public:
  Lease(Lease&& other) noexcept
      : pass_{std::exchange(other.pass_, nullptr)},
        visit_{other.visit_},
        bytes_{other.bytes_},
        begin_{std::move(other.begin_)},
        discarded_{other.discarded_} {
    if (pass_ != nullptr) pass_->lease_ = this;
  }
  Lease& operator=(Lease&&) = delete;
  ~Lease() {
    if (pass_ != nullptr) pass_->release(*this);
  }

  /// @brief The slot's bytes are spoilt: it is emptied at the release and the pass is over, so that
  /// nobody finds them there again.
  void discard() noexcept { discarded_ = true; }
  [[nodiscard]] PartId part() const noexcept { return visit_.part; }
  /// @brief What to compute with: the slot, or the bound form where there is a finisher. A device
  /// address range.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  friend class Pass;
  Lease(Pass& pass, PlannedVisit visit, std::span<std::byte> bytes, TraceBegin begin)
      : pass_{&pass}, visit_{visit}, bytes_{bytes}, begin_{std::move(begin)} {
    pass.lease_ = this;
  }
  Pass* pass_;  ///< null: moved from, or ended with the pass
  PlannedVisit visit_;
  std::span<std::byte> bytes_;
  TraceBegin begin_;
  bool discarded_ = false;
};

/// @brief One walk over the visit order. Destroying it before its end aborts it: a lease that lives
/// ends, what is in flight completes, the rest is forgotten.
template <execution_backend Backend, progress_loop Loop, class Rules>
class BlockPipeline<Backend, Loop, Rules>::Pass {
 public:
  Pass(Pass&& other) noexcept
      : pipeline_{std::exchange(other.pipeline_, nullptr)},
        visits_{std::move(other.visits_)},
        compute_{other.compute_},
        next_{other.next_},
        lease_{std::exchange(other.lease_, nullptr)} {
    if (lease_ != nullptr) lease_->pass_ = this;
  }
  Pass& operator=(Pass&&) = delete;
  ~Pass() {
    if (lease_ != nullptr) {
      Lease& lease = *lease_;
      release(lease);
      lease.pass_ = nullptr;
    }
    if (pipeline_ != nullptr) pipeline_->end_pass(*compute_);
  }

  [[nodiscard]] bool done() const noexcept { return next_ == visits_.size(); }
  /// @brief The next visit's bytes. Waits on the host while its reads are not finished; never for
  /// the device.
  /// @throws StorageError, DeviceError: the first failure since the last acquire. ContractViolation
  /// if the pass is done or the previous lease still lives.
  [[nodiscard]] Lease acquire() {
    expects(!done(), "the pass has no further visit");
    expects(lease_ == nullptr, "the previous lease must end before the next acquire");
    const std::size_t index = next_;
    const PlannedVisit visit = visits_[index];
    next_ = visits_.size();  // a pass ends with its first failure
    const std::span<std::byte> bytes = pipeline_->begin_visit(visit, *compute_);
    auto begin = pipeline_->trace_.begin_on(*compute_);  // what was waited for is not computing
    next_ = index + 1;
    return Lease{*this, visit, bytes, std::move(begin)};
  }

 private:
  friend class BlockPipeline;
  friend class Lease;
  Pass(BlockPipeline& pipeline, std::vector<PlannedVisit> visits, Stream& compute)
      : pipeline_{&pipeline}, visits_{std::move(visits)}, compute_{&compute} {}

  void release(Lease& lease) noexcept {
    lease_ = nullptr;
    if (lease.discarded_) next_ = visits_.size();  // what it planned with is gone
    if constexpr (!Rules::release_always) {
      if (std::uncaught_exceptions() > 0) return;
    }
    try {
      pipeline_->trace_.end_on("compute", Lane::compute, lease.part(), std::move(lease.begin_),
                               lease.bytes_.size(), *compute_);
      if (pipeline_->finisher_) return;  // released when it was finished
      pipeline_->end_visit(lease.visit_, *compute_, lease.discarded_);
    } catch (...) {
      pipeline_->driver_.machine().failed_with(std::current_exception());
    }
  }

  BlockPipeline* pipeline_;
  std::vector<PlannedVisit> visits_;
  Stream* compute_;
  std::size_t next_ = 0;
  Lease* lease_ = nullptr;  ///< of the visit at hand, wherever it was moved to
};

}  // namespace block_streamer::inline v1
