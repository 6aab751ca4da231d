// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/bound_blocks.hpp>
#include <block_streamer/block/dtype_finisher.hpp>
#include <block_streamer/block/masters.hpp>
#include <block_streamer/block/step_updates.hpp>
#include <block_streamer/block/stream_bridge.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/pipeline/recorded_pass.hpp>
#include <block_streamer/plan/repeated_plan.hpp>
#include <block_streamer/plan/visit_order.hpp>
#include <block_streamer/train/activation_store.hpp>
#include <block_streamer/train/autocast_state.hpp>
#include <block_streamer/train/gradient_exit.hpp>
#include <block_streamer/train/master_watch.hpp>
#include <block_streamer/train/rng_replay.hpp>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {
/// DTypeFinisher behind the pipeline's virtual call.
template <execution_backend Backend>
class TypeChange final : public Finisher<Backend> {
 public:
  TypeChange(std::span<const BlockLayout> wire, DType target, at::Device device)
      : finisher_{wire, target, device} {}
  [[nodiscard]] const BlockLayout& layout(BlockId block) const { return finisher_.layout(block); }
  [[nodiscard]] std::uint64_t bound_byte_count(PartId part) const override {
    return finisher_.bound_byte_count(part);
  }
  void enqueue(PartId part, std::span<const std::byte> wire, std::span<std::byte> bound,
               typename Backend::Stream& compute) override {
    finisher_.enqueue(part, wire, bound, compute);
  }

 private:
  DTypeFinisher finisher_;
};
}  // namespace detail

/// @brief The heap core of a Streamer: pipeline and bound blocks together, and the walks over them.
/// Shared by the Streamer and by the autograd nodes it made, so a graph may outlive the Streamer.
/// **Threads.** One walk at a time; a second is refused.
template <streamable_block B, execution_backend Backend>
class StreamedRun {
 public:
  using Block = B;
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;
  using Pipeline = BlockPipeline<Backend>;
  /// What the last block gives beside what flows, in tensors.
  static constexpr std::size_t extra_count = extra_count_of<Block>;

  /// @param dtype    what floating weights are computed in; nullopt: as stored.
  /// @param masters  what the storage was made of, if it was; null: the storage does not change.
  /// @param updates  who steps the parameters inside a backward; null: masters do not train.
  StreamedRun(std::vector<Block> blocks, AnyStorage storage, Backend backend,
              PipelineOptions options, std::optional<DType> dtype,
              std::shared_ptr<const Masters> masters = nullptr,
              std::shared_ptr<StepUpdates> updates = nullptr)
      : backend_{std::move(backend)},
        bridge_{backend_},
        options_{std::move(options)},
        blocks_{std::move(blocks), bridge_.device(), updates != nullptr ? masters : nullptr},
        masters_{std::move(masters)},
        watch_{masters_, updates != nullptr},
        updates_{std::move(updates)},
        exit_{backend_, masters_, StreamBridge<Backend>::computes_on_host, options_.trace},
        activations_{backend_, options_.activations, StreamBridge<Backend>::computes_on_host} {
    expects(storage.block_count() == blocks_.size(),
            "the storage has as many blocks as the list (" + std::to_string(storage.block_count()) +
                " stored, " + std::to_string(blocks_.size()) + " listed)");
    options_.computes_on_host = StreamBridge<Backend>::computes_on_host;
    build(std::move(storage), dtype);
  }

  /// @brief The lock of one walk.
  class Walk {
   public:
    explicit Walk(StreamedRun& run) : run_{run} {
      expects(!run_.running_.exchange(true),
              "the streamer is in use: calls must not overlap, nor come from inside a block");
    }
    Walk(const Walk&) = delete;
    Walk& operator=(const Walk&) = delete;
    ~Walk() { run_.running_ = false; }

   private:
    StreamedRun& run_;
  };

  /// @brief Visits `order`, calling `visit(block, run_block, bytes)` for each; `run_block(hidden,
  /// context, training, extras)` runs the block on its bytes, and is only valid inside. The visit's
  /// weights stay usable until `visit` returns.
  template <class Visit>
  void walk(const VisitOrder& order, const VisitOrder& hint, Visit&& visit) {
    if (recorded_ != nullptr) return recorded_->walk(order, visit);
    if (!pipeline_->is_open()) bind();
    compute_ = &bridge_.current();
    auto pass = pipeline_->begin_pass(order, hint, *compute_);
    visit_all(pass, order.size(), visit);
  }

  // ---- walks that a graph of the device does again and again; @see BlockPipeline
  /// @param back_to  after the list the walks return, down to this block.
  [[nodiscard]] RepeatedPlan prepare_recording(std::optional<std::size_t> back_to = {}) {
    if (!pipeline_->is_open()) bind();
    compute_ = &bridge_.current();
    return pipeline_->prepare_recording(ascending(0, blocks_.size()), *compute_, back_to);
  }
  /// @brief While it lives the walks are recorded, as parts of the one pass of its plan.
  /// @pre prepare_recording() made the plan on the same stream.
  class RecordedWalks {
   public:
    /// Whoever records.
    struct Watch {
      std::function<void(BlockId)> begins, ends;  ///< are called around each visit
      /// Makes random numbers go on where the block's first visit began, until what it returns is
      /// destroyed; null: no block is visited twice.
      std::function<std::shared_ptr<void>(BlockId)> random{};
    };
    RecordedWalks(StreamedRun& run, const RepeatedPlan& plan, Watch watch)
        : run_{run},
          pass_{run.pipeline_->begin_recording(plan, *run.compute_)},
          watch_{std::move(watch)} {
      run_.recorded_ = this;
    }
    RecordedWalks(const RecordedWalks&) = delete;
    RecordedWalks& operator=(const RecordedWalks&) = delete;
    ~RecordedWalks() { run_.recorded_ = nullptr; }

   private:
    friend StreamedRun;
    template <class Visit>
    void walk(const VisitOrder& order, Visit&& visit) {
      auto next = order.begin();
      run_.visit_all(pass_, order.size(), [&](BlockId block, auto&&... visited) {
        expects(*next++ == PartId{block}, "recorded walks go as they were planned");
        watch_.begins(block);
        visit(block, std::forward<decltype(visited)>(visited)...);
        watch_.ends(block);
      });
    }
    StreamedRun& run_;
    typename Pipeline::Pass pass_;
    Watch watch_;
  };
  /// @brief Where random numbers are before a visit, for replay_random(); nullopt where walks are
  /// recorded: whoever records knows.
  [[nodiscard]] std::optional<RngState> random_now() const {
    if (recorded_ != nullptr) return std::nullopt;
    return RngState::capture(device());
  }
  /// @brief Random numbers go on where they were before a visit, until the result is destroyed.
  [[nodiscard]] std::shared_ptr<void> replay_random(BlockId block,
                                                    const std::optional<RngState>& then) const {
    if (recorded_ != nullptr) return recorded_->watch_.random(block);
    return std::make_shared<RngScope>(then.value());
  }
  /// @brief Does it: `launch` enqueues the graph on LibTorch's current stream.
  template <class Launch>
  void replay_walk(const RepeatedPlan& plan, Launch&& launch) {
    compute_ = &bridge_.current();
    pipeline_->replay(plan, *compute_, launch);
  }

  // ---- masters: what the caller may change between passes
  [[nodiscard]] const Masters* masters() const noexcept { return masters_.get(); }
  [[nodiscard]] bool masters_train() const {
    return masters_ != nullptr && updates_ != nullptr && masters_->any_trains();
  }
  /// @brief Before a forward: what is resident of masters that train is forgotten, since optimizers
  /// may change them unseen (LibTorch's SGD writes behind the version counter); so is whatever else
  /// was seen to change.
  void refetch_masters() {
    if (masters_ == nullptr) return;
    masters_->check_in_place();
    const auto stale = watch_.stale();
    if (!stale.empty()) pipeline_->forget(stale);
  }
  /// @brief Waits until no copy reads a master any more: the caller may change them.
  void release_masters() { pipeline_->drain(); }

  /// @brief The visit's weights are not computed with any more. Inside walk().
  void end_visit() noexcept { blocks_.end_visit(); }
  /// @brief Takes the gradients of a block's trained weights. Inside walk(), after end_visit().
  void take_gradients(GradientLedger& ledger, BlockId block, std::span<const std::uint32_t> masters,
                      std::vector<at::Tensor> gradients, std::vector<at::Tensor> of_adapters) {
    const std::uint64_t sent =
        exit_.take(ledger, block, masters, std::move(gradients), std::move(of_adapters), *compute_);
    if (sent > 0) pipeline_->count_copied_out(sent);
  }
  /// @brief Waits until all gradients taken are where they go.
  void settle_gradients(GradientLedger& ledger) { exit_.settle(ledger); }
  /// @brief Waits for copies of a backward that failed.
  void abandon_gradients() noexcept { exit_.abandon(); }
  /// @brief Device memory held for gradients on their way out.
  [[nodiscard]] std::uint64_t gradient_byte_count() const noexcept {
    return exit_.device_byte_count();
  }
  [[nodiscard]] StepUpdates* updates() const noexcept { return updates_.get(); }

  // ---- inputs of blocks between a forward and its backward
  [[nodiscard]] ActivationStore<Backend>& activations() noexcept { return activations_; }
  /// @brief The stream that the visits of the running or last walk compute on.
  [[nodiscard]] typename Backend::Stream& compute() noexcept { return *compute_; }

  /// @brief Computes in another type from now on. @pre no walk; graphs made before are refused
  /// afterwards. After an exception it is the type before.
  void change_dtype(std::optional<DType> dtype) {
    const Walk walk{*this};
    expects(!dtype || is_computable(*dtype), "a streamer computes in F16, BF16, F32 or F64");
    auto change = change_to(pipeline_->storage(), dtype);
    const auto* const next = change.get();
    auto bound = blocks_.match(layouts(next));
    pipeline_->change_finisher(std::move(change));
    change_ = next;
    blocks_.bind(std::move(bound));
    ++generation_;
  }
  void weave(AdapterTable adapters) {
    const Walk walk{*this};
    blocks_.weave(std::move(adapters));
    ++generation_;
  }

  [[nodiscard]] Pipeline& pipeline() noexcept { return *pipeline_; }
  [[nodiscard]] const BoundBlocks<Block>& blocks() const noexcept { return blocks_; }
  [[nodiscard]] at::Device device() const { return bridge_.device(); }
  [[nodiscard]] std::string device_name() const { return backend_.name(); }
  /// @brief Changes whenever what a block computes may have changed: a graph from another
  /// generation is stale.
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }

  /// @throws ContractViolation naming what is wrong with the input.
  void check_input(const at::Tensor& hidden) const {
    expects(hidden.defined(), "the input of a streamer is a tensor");
    if (hidden.device() != device()) {
      throw ContractViolation{"the input is on " + hidden.device().str() +
                              ", the streamer computes on " + device().str()};
    }
    if (casts_alike(hidden)) return;
    if (blocks_.dtype() && hidden.scalar_type() != scalar_type_of(*blocks_.dtype())) {
      throw ContractViolation{std::string{"the input is "} + c10::toString(hidden.scalar_type()) +
                              ", the blocks compute in " + std::string{name_of(*blocks_.dtype())}};
    }
  }

 private:
  struct VisitEnd {
    StreamedRun& run;
    ~VisitEnd() {
      run.blocks_.end_visit();
      forget_casts(run.device());
    }
  };

  template <class Visit>
  void visit_all(typename Pipeline::Pass& pass, std::size_t count, Visit&& visit) {
    forget_casts(device());  // of a block's own tensors, made outside
    for (; count > 0 && !pass.done(); --count) {
      auto lease = pass.acquire();
      const BlockId block = lease.part().block;
      const VisitEnd end{*this};
      visit(
          block,
          [&](const Hidden& hidden, Context& context, bool training,
              std::vector<at::Tensor>* extras = nullptr) {
            try {
              return blocks_.run(block, lease.bytes(), hidden, context, training, extras);
            } catch (...) {  // whatever it did before, its weights are not to be trusted any more
              blocks_.end_visit();
              blocks_.forget_views(lease.bytes());
              lease.discard();
              throw;
            }
          },
          lease.bytes());
    }
  }

  /// Autocast makes one type of floating inputs and weights.
  [[nodiscard]] bool casts_alike(const at::Tensor& hidden) const {
    return hidden.is_floating_point() && at::autocast::is_autocast_enabled(device().type());
  }
  void build(AnyStorage storage, std::optional<DType> dtype) {
    auto change = change_to(storage, dtype);
    change_ = change.get();
    pipeline_ =
        std::make_unique<Pipeline>(std::move(storage), backend_, options_, std::move(change));
    bind();
  }
  /// Null: the stored types are those computed with.
  [[nodiscard]] std::unique_ptr<detail::TypeChange<Backend>> change_to(
      const AnyStorage& storage, std::optional<DType> dtype) const {
    std::vector<BlockLayout> wire;
    for (std::size_t i = 0; i < storage.block_count(); ++i)
      wire.push_back(storage.image(block_at(i)).layout);
    if (!dtype || !differs(wire, *dtype)) return nullptr;
    return std::make_unique<detail::TypeChange<Backend>>(wire, *dtype, device());
  }
  [[nodiscard]] auto layouts(const detail::TypeChange<Backend>* change) const {
    return [this, change](BlockId block) -> const BlockLayout& {
      return change != nullptr ? change->layout(block) : pipeline_->storage().image(block).layout;
    };
  }
  void bind() { blocks_.bind(blocks_.match(layouts(change_))); }
  [[nodiscard]] static bool differs(const std::vector<BlockLayout>& layouts, DType dtype) {
    for (const BlockLayout& layout : layouts) {
      for (const TensorPlacement& tensor : layout.tensors) {
        if (is_computable(tensor.spec.dtype) && tensor.spec.dtype != dtype) return true;
      }
    }
    return false;
  }

  Backend backend_;
  StreamBridge<Backend> bridge_;
  PipelineOptions options_;
  BoundBlocks<Block> blocks_;
  std::shared_ptr<const Masters> masters_;
  MasterWatch watch_;
  std::shared_ptr<StepUpdates> updates_;
  GradientExit<Backend> exit_;
  ActivationStore<Backend> activations_;
  std::unique_ptr<Pipeline> pipeline_;
  typename Backend::Stream* compute_ = nullptr;  ///< of the running pass
  RecordedWalks* recorded_ = nullptr;
  const detail::TypeChange<Backend>* change_ = nullptr;  ///< owned by the pipeline
  std::atomic<bool> running_ = false;
  std::uint64_t generation_ = 0;
};

}  // namespace block_streamer::inline v1
