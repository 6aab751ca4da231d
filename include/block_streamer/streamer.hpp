// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/capture/captured_forward.hpp>
#include <block_streamer/capture/captured_step.hpp>
#include <block_streamer/optim/external_optimizer.hpp>
#include <block_streamer/optim/no_optimizer.hpp>
#include <block_streamer/optim/optimizer_policy.hpp>
#include <block_streamer/optim/policy_seat.hpp>
#include <block_streamer/train/streamed_node.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

using StreamerOptions = PipelineOptions;

/// @brief Runs an ordered list of blocks whose weights stay in storage, on one device, with at most
/// prefetch_ahead + 1 of them resident (and those that device_budget caches). Use it wherever the
/// list would be called: inside a larger model, in inference, or in training, where
/// `loss.backward()` fetches the weights again in reverse. In evaluation mode (the default) nothing
/// is kept for a backward.
/// @tparam Storage    a storage tier, owned. @tparam Optimizer  when gradients reach whom;
/// NoOptimizer for frozen lists.
/// **Shapes.** input and output: whatever flows between the blocks, e.g. (B, T, C), on the
/// backend's device, in the dtype that the blocks compute in.
/// **Threads.** Externally synchronised; overlapping or reentrant calls are refused.
/// **Lifetime.** A movable handle; graphs made by it keep what they need and may outlive it.
/// @throws BindingError if stored and expected tensors differ, Error if a block exceeds the slot
/// budget.
template <streamable_block Block, storage_tier Storage, optimizer_policy Optimizer,
          execution_backend Backend>
class Streamer {
 public:
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;
  /// What a forward returns: Hidden, or all that the last block gives. @see resulting_block
  using Result = ResultOf<Block>;

  /// @param storage  a MasterStorage (ram_storage_of) makes the blocks' own tensors train, as far
  /// as they require a gradient, unless the policy never wants one.
  Streamer(std::vector<Block> blocks, Storage storage, Backend backend,
           StreamerOptions options = {}, Optimizer optimizer = {})
      : seat_{std::make_shared<PolicySeat<Optimizer>>(std::move(optimizer))} {
    auto masters = masters_of(storage);
    const bool train = seat_->policy.delivery() != GradientDelivery::never;
    run_ =
        std::make_shared<Run>(std::move(blocks), AnyStorage{std::move(storage)}, std::move(backend),
                              options, options.dtype, std::move(masters), train ? seat_ : nullptr);
  }

  /// @brief Runs the list. @param context  what all blocks share; a training forward keeps a copy
  /// for its backward, which also gives gradients to the tensors that it names (@see
  /// context_with_tensors): summed over the blocks, in the order of the backward.
  [[nodiscard]] Result forward(const Hidden& input, Context& context) {
    return std::move(
        results_of(streamed_forward<Run>(run_, {{input}, {&context, 1}}, training_)).front());
  }
  [[nodiscard]] Result forward(const Hidden& input, Context&& context) {
    return forward(input, context);
  }
  [[nodiscard]] Result forward(const Hidden& input) requires std::is_empty_v<Context> {
    return forward(input, Context{});
  }

  /// @brief Runs the list over several micro-batches that pass each block together: one fetch of a
  /// block serves them all, in the forward and in the backward.
  /// The outputs are results of one graph node, so one backward over all losses,
  /// `(loss_1 + … + loss_n).backward()`, makes one reverse pass. Parameters get the sum of the
  /// gradients, with the bits of one forward and backward after another where .grad was empty and
  /// no tensor belongs to several blocks (else sums are taken in another order).
  /// @param inputs    at least one; shapes may differ.
  /// @param contexts  one each; a training forward keeps copies for its backward.
  /// @param random    where the random numbers of each begin, moved on to where they end: each
  /// draws what it would draw alone, and the caller's generators stay as they are. Empty: all draw
  /// from the caller's generators, block by block.
  /// **Cost.** The saved inputs of the blocks of all micro-batches; one micro-batch's graph of one
  /// block at a time.
  [[nodiscard]] std::vector<Result> forward(std::span<const Hidden> inputs,
                                            std::span<Context> contexts,
                                            std::span<RngState> random = {}) {
    expects(!inputs.empty() && inputs.size() == contexts.size(),
            "a forward has at least one micro-batch, and a context for each");
    expects(random.empty() || random.size() == inputs.size(),
            "random states are given for all micro-batches or for none");
    return results_of(
        streamed_forward<Run>(run_, {{inputs.begin(), inputs.end()}, contexts, random}, training_));
  }
  [[nodiscard]] std::vector<Result> forward(
      std::span<const Hidden> inputs,
      std::span<RngState> random = {}) requires std::is_empty_v<Context> {
    std::vector<Context> contexts(inputs.size());
    return forward(inputs, contexts, random);
  }

  /// @brief A forward in evaluation mode that shows what leaves each block: `observer(BlockId,
  /// const Hidden&)`. For finding where values go wrong, or for features of inner layers. What it
  /// is shown may be kept.
  template <class Observer>
  [[nodiscard]] Result forward_observed(const Hidden& input, Context& context,
                                        Observer&& observer) {
    run_->check_input(input);
    const typename Run::Walk walk{*run_};
    return std::move(results_of(forward_pass<Run>(*run_, {{input}, {&context, 1}}, nullptr,
                                                  /*training=*/false, observer))
                         .front());
  }

  /// @brief Forwards in evaluation mode that are recorded in a graph of the device, copies
  /// included, and replayed. Needs block/device_graph_cuda.hpp for a CUDA backend.
  /// @param context  what the blocks get where a forward of it names no other.
  /// @throws UnsupportedError saying why: the storage is not in page-locked memory as a whole, or
  /// the device has no graphs.
  [[nodiscard]] CapturedForward<Block, Backend> capture(Context context,
                                                        CaptureOptions options = {}) {
    return {run_, std::move(context), options};
  }
  [[nodiscard]] CapturedForward<Block, Backend> capture(
      CaptureOptions options = {}) requires std::default_initializable<Context> {
    return {run_, Context{}, options};
  }

  /// @brief Training steps of attached adapters that are recorded in a graph of the device, copies
  /// included, and replayed: forward, loss and backward. Needs block/device_graph_cuda.hpp for a
  /// CUDA backend.
  /// @param loss     of what forward() returns and of the targets that a step brings; called while
  /// a step is recorded. Other tensors that it uses keep their places.
  /// @param context  what the blocks get where a step names no other.
  /// @throws UnsupportedError saying why: as capture() does, and if inputs of blocks wait elsewhere
  /// than on the device.
  [[nodiscard]] CapturedStep<Block, Backend> capture_step(StepLoss<Block> loss, Context context,
                                                          CaptureOptions options = {}) {
    return {run_, std::move(loss), std::move(context), options};
  }
  [[nodiscard]] CapturedStep<Block, Backend> capture_step(
      StepLoss<Block> loss,
      CaptureOptions options = {}) requires std::default_initializable<Context> {
    return {run_, std::move(loss), Context{}, options};
  }

  Streamer& train(bool training = true) noexcept {
    training_ = training;
    return *this;
  }
  Streamer& eval() noexcept { return train(false); }
  [[nodiscard]] bool is_training() const noexcept { return training_; }

  /// @brief Weaves adapters into the blocks; their parameters are what trains. Replaces earlier
  /// ones.
  void attach(AdapterTable adapters) { run_->weave(std::move(adapters)); }
  /// @brief Everything that trains, block by block, each tensor once: leaf tensors whose .grad a
  /// backward fills. The masters among them are the caller's own, in host memory.
  [[nodiscard]] std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      const auto of_block = run_->blocks().parameters(i);
      const std::size_t masters = run_->blocks().owned_masters(i).size();  // buffers among them
      for (std::size_t p = 0; p < of_block.size(); ++p) {
        if (p >= masters || of_block[p].requires_grad()) all.push_back(of_block[p]);
      }
    }
    return all;
  }

  /// @brief Opens a step of the optimizer policy: the next backward does not fill .grad, it hands
  /// each block's gradient to the policy as soon as it is there, while lower blocks compute.
  /// Clipping and accumulation need all gradients first: @see step.
  /// @throws ContractViolation if the policy does not step by itself, or a step is open.
  void begin_step(const StepContext& context) {
    expects_policy();
    seat_->begin_step(context);
  }
  /// @brief Closes the step. A backward that failed in it has stepped the blocks above its failure.
  void end_step() {
    expects_policy();
    seat_->end_step();
  }
  /// @brief A whole step after one or several backwards: hands the .grad of every block to the
  /// policy and takes it away, so that the next backward starts anew.
  void step(const StepContext& context) {
    begin_step(context);
    try {
      for (std::size_t i = 0; i < run_->blocks().size(); ++i) sweep(i);
    } catch (...) {
      seat_->end_step();
      throw;
    }
    end_step();
  }

  /// @brief Computes in `dtype` from now on; stored bytes are converted at each visit where they
  /// differ.
  /// Statistics and history begin anew.
  Streamer& to(DType dtype) {
    run_->change_dtype(dtype);
    return *this;
  }
  /// @brief Accepts the backend's own device. @throws UnsupportedError naming both for another.
  Streamer& to(const at::Device& device) {
    const at::Device own = run_->device();
    if (device.type() != own.type() ||
        (device.has_index() && own.has_index() && device.index() != own.index())) {
      throw UnsupportedError{"this streamer computes on " + own.str() + "; for " + device.str() +
                             " make one with that backend"};
    }
    return *this;
  }

  /// @brief Waits until nothing is in flight.
  void drain() { run_->pipeline().drain(); }
  /// @brief Drains and gives device and staging memory back; the next forward takes them again.
  void close() { run_->pipeline().close(); }

  [[nodiscard]] Statistics statistics() const { return run_->pipeline().statistics(); }
  void reset_stats() { run_->pipeline().reset_statistics(); }
  /// @brief The last 4,096 changes of slots.
  [[nodiscard]] std::vector<Transition> history() const { return run_->pipeline().history(); }
  /// @brief Slots, their size, staging: what the streamer takes of memory.
  [[nodiscard]] const TransferShape& shape() const noexcept { return run_->pipeline().shape(); }
  [[nodiscard]] std::size_t block_count() const noexcept { return run_->blocks().size(); }
  [[nodiscard]] at::Device device() const { return run_->device(); }
  [[nodiscard]] std::optional<DType> dtype() const noexcept { return run_->blocks().dtype(); }
  [[nodiscard]] Optimizer& optimizer() noexcept { return seat_->policy; }
  /// @brief Device memory held for gradients on their way to the host, in bytes: two places of the
  /// largest block's masters, from the first backward on; 0 where the device is the host.
  [[nodiscard]] std::uint64_t gradient_byte_count() const noexcept {
    return run_->gradient_byte_count();
  }

  /// @brief What the inputs of blocks take that wait for a backward.
  [[nodiscard]] ActivationUsage activations() const { return run_->activations().usage(); }

 private:
  using Run = StreamedRun<Block, Backend>;

  [[nodiscard]] static std::vector<Result> results_of(PassOutputs<Run> outputs) {
    if constexpr (std::same_as<Result, Hidden>) {
      return std::move(outputs.hidden);
    } else {
      std::vector<Result> results;
      for (std::size_t b = 0; b < outputs.hidden.size(); ++b)
        results.push_back(
            whole_result<Block>(std::move(outputs.hidden[b]), std::move(outputs.extras[b])));
      return results;
    }
  }
  [[nodiscard]] std::shared_ptr<const Masters> masters_of(const Storage& storage) const {
    if constexpr (requires { storage.masters(); }) {
      return storage.masters();
    } else {
      return nullptr;
    }
  }
  void expects_policy() const {
    expects(seat_->policy.delivery() == GradientDelivery::in_backward,
            "the optimizer policy does not step by itself: step an optimizer over parameters()");
  }
  void sweep(std::size_t block) {
    const auto of_block = run_->blocks().parameters(block);
    std::vector<at::Tensor> parameters{of_block.begin(), of_block.end()}, gradients;
    if (parameters.empty()) return;
    for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    seat_->update(block_at(block), parameters, gradients);
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor{};
  }

  std::shared_ptr<PolicySeat<Optimizer>> seat_;  // shared with the run
  std::shared_ptr<Run> run_;                     // shared with the graphs that it made
  bool training_ = false;
};

template <class Block, class Storage, class Backend>
Streamer(std::vector<Block>, Storage, Backend)
    -> Streamer<Block, Storage, ExternalOptimizer, Backend>;
template <class Block, class Storage, class Backend>
Streamer(std::vector<Block>, Storage, Backend, StreamerOptions)
    -> Streamer<Block, Storage, ExternalOptimizer, Backend>;
template <class Block, class Storage, class Backend, class Optimizer>
Streamer(std::vector<Block>, Storage, Backend, StreamerOptions, Optimizer)
    -> Streamer<Block, Storage, Optimizer, Backend>;

}  // namespace block_streamer::inline v1
