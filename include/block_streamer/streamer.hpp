// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/optim/external_optimizer.hpp>
#include <block_streamer/optim/no_optimizer.hpp>
#include <block_streamer/optim/optimizer_policy.hpp>
#include <block_streamer/train/streamed_node.hpp>

#include <memory>
#include <optional>
#include <string>
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

  Streamer(std::vector<Block> blocks, Storage storage, Backend backend,
           StreamerOptions options = {}, Optimizer optimizer = {})
      : optimizer_{std::move(optimizer)},
        run_{std::make_shared<Run>(std::move(blocks), AnyStorage{std::move(storage)},
                                   std::move(backend), options, options.dtype)} {
    if (optimizer_.delivery() == GradientDelivery::in_backward) {
      throw UnsupportedError{
          "an optimizer that updates inside the backward is not supported yet: step one over "
          "parameters()"};
    }
  }

  /// @brief Runs the list. @param context  what all blocks share; a training forward keeps a copy
  /// for its backward.
  [[nodiscard]] Hidden forward(const Hidden& input, Context& context) {
    return streamed_forward(run_, input, context, training_);
  }
  [[nodiscard]] Hidden forward(const Hidden& input, Context&& context) {
    return forward(input, context);
  }

  /// @brief A forward in evaluation mode that shows what leaves each block: `observer(BlockId,
  /// const Hidden&)`. For finding where values go wrong, or for features of inner layers. What it
  /// is shown may be kept.
  template <class Observer>
  [[nodiscard]] Hidden forward_observed(const Hidden& input, Context& context,
                                        Observer&& observer) {
    run_->check_input(input);
    const typename Run::Walk walk{*run_};
    return forward_pass(*run_, input, context, nullptr, /*training=*/false, observer);
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
  /// @brief Everything that trains, block by block: leaf tensors whose .grad a backward fills.
  [[nodiscard]] std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < run_->blocks().size(); ++i) {
      const auto of_block = run_->blocks().parameters(i);
      all.insert(all.end(), of_block.begin(), of_block.end());
    }
    return all;
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
  [[nodiscard]] Optimizer& optimizer() noexcept { return optimizer_; }

 private:
  using Run = StreamedRun<Block, Backend>;
  Optimizer optimizer_;
  std::shared_ptr<Run> run_;  // shared with the graphs that it made
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
