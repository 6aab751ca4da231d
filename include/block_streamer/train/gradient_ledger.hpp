// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/masters.hpp>
#include <block_streamer/block/step_updates.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/train/background_updates.hpp>
#include <block_streamer/train/gradient_route.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// The memory of a gradient that is handed over.
enum class GradientMemory : std::uint8_t {
  lent,   ///< reused when the call returns
  given,  ///< dense, nobody else's: may become a .grad
};

/// @brief The gradients of one backward as they come to the host: sums those of a tensor that
/// several blocks use, in the order of the backward, and passes each on once it is whole.
/// **Threads.** The visitor's. **Errors.** After an exception the blocks passed on stay so.
class GradientLedger {
 public:
  /// What the ledger knows of a block.
  struct Block {
    std::span<const at::Tensor> parameters;  ///< owned masters, then adapters'
    std::span<const std::uint32_t> owned;    ///< the masters that come first
    std::vector<GradientRoute> routes;       ///< of each parameter
  };

  /// @param masters  may be null. @param updates  not null if a route is `update`.
  GradientLedger(const Masters* masters, std::vector<Block> blocks, StepUpdates* updates)
      : masters_{masters}, blocks_{std::move(blocks)}, updates_{updates} {
    for (const Block& block : blocks_) {
      results_.emplace_back(block.parameters.size());
      completed_.push_back(0);
    }
    if (masters_ == nullptr) return;
    routes_.assign(masters_->all().size(), GradientRoute::drop);
    sums_.resize(routes_.size());
    for (const Block& block : blocks_) {
      for (std::size_t i = 0; i < block.owned.size(); ++i)
        routes_[block.owned[i]] = block.routes[i];
    }
  }

  [[nodiscard]] const Masters& masters() const noexcept { return *masters_; }
  [[nodiscard]] GradientRoute route(std::uint32_t master) const { return routes_[master]; }
  /// @brief A block's update is due as soon as its gradients are on the host.
  [[nodiscard]] bool updates() const noexcept { return updates_ != nullptr; }

  /// @brief The gradient of one block's use of a master: on the host, in the master's type.
  void add(std::uint32_t master, at::Tensor gradient, GradientMemory memory) {
    if (!gradient.defined() || route(master) == GradientRoute::drop) return;
    Sum& sum = sums_[master];
    const c10::NoGradGuard no_grad;
    if (sum.gradient.defined()) {
      sum.gradient.add_(gradient);
      return;
    }
    const bool keep = memory == GradientMemory::lent && (*masters_)[master].use_count > 1;
    sum = {keep ? at::clone(gradient) : std::move(gradient), keep ? GradientMemory::given : memory};
  }

  /// @brief Nothing more comes from this block.
  /// @param of_adapters  gradients on their own device.
  /// @param background   where an update may go on after this returns; null: nowhere.
  void complete(BlockId block, std::vector<at::Tensor> of_adapters,
                BackgroundUpdates* background = nullptr) {
    const std::size_t b = index_of(block);
    if (std::exchange(completed_[b], std::uint8_t{1}) != 0) return;
    const Block& known = blocks_[b];
    std::vector<Sum> gradients(known.parameters.size());
    for (std::size_t i = 0; i < known.owned.size(); ++i)
      gradients[i] = std::exchange(sums_[known.owned[i]], Sum{});
    for (std::size_t i = 0; i < of_adapters.size(); ++i)
      gradients[known.owned.size() + i].gradient = std::move(of_adapters[i]);
    pass_on(block, known, gradients, background);
  }
  /// @brief The backward has ended: what no visit completed is passed on as well.
  void complete_all() {
    for (std::size_t b = blocks_.size(); b > 0; --b) complete(block_at(b - 1), {});
  }
  [[nodiscard]] std::size_t block_count() const noexcept { return blocks_.size(); }
  [[nodiscard]] std::span<const at::Tensor> parameters(std::size_t block) const noexcept {
    return blocks_[block].parameters;
  }
  /// @brief What goes back to the engine, per block and parameter.
  [[nodiscard]] std::vector<std::vector<at::Tensor>>& results() noexcept { return results_; }

 private:
  struct Sum {
    at::Tensor gradient;
    GradientMemory memory = GradientMemory::given;
  };

  void pass_on(BlockId block, const Block& known, std::vector<Sum>& gradients,
               BackgroundUpdates* background) {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> updated(gradients.size());
    bool any = false;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      auto& [gradient, memory] = gradients[i];
      if (!gradient.defined() || known.routes[i] == GradientRoute::drop) continue;
      const bool of_master = i < known.owned.size();
      if (known.routes[i] == GradientRoute::update) {
        updated[i] = std::move(gradient);
        any = true;
      } else if (known.routes[i] == GradientRoute::accumulate && of_master) {
        accumulate(known.parameters[i], gradient, memory);
      } else {  // of adapters, which are on the device, the engine makes the .grad
        results_[index_of(block)][i] = kept(gradient, memory);
      }
    }
    if (!any) return;
    update(block, {known.parameters.begin(), known.parameters.end()}, std::move(updated),
           background);
  }
  void update(BlockId block, std::vector<at::Tensor> parameters, std::vector<at::Tensor> gradients,
              BackgroundUpdates* background) {
    const auto on_host = [](const at::Tensor& gradient) {
      return !gradient.defined() || gradient.is_cpu();
    };
    if (background != nullptr && updates_->any_thread() &&
        std::ranges::all_of(gradients, on_host)) {
      background->start(*updates_, block, std::move(parameters), std::move(gradients));
      return;
    }
    if (background != nullptr) background->wait();
    updates_->update(block, parameters, gradients);
  }
  [[nodiscard]] static at::Tensor kept(const at::Tensor& gradient, GradientMemory memory) {
    return memory == GradientMemory::lent ? at::clone(gradient) : gradient;
  }
  static void accumulate(const at::Tensor& parameter, const at::Tensor& gradient,
                         GradientMemory memory) {
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined()) {
      grad.add_(gradient);
    } else {
      grad = kept(gradient, memory);
    }
  }

  const Masters* masters_;
  std::vector<Block> blocks_;
  StepUpdates* updates_;
  std::vector<GradientRoute> routes_;             ///< per master
  std::vector<Sum> sums_;                         ///< per master, until its owner is complete
  std::vector<std::vector<at::Tensor>> results_;  ///< per block and parameter
  std::vector<std::uint8_t> completed_;           ///< per block
};

}  // namespace block_streamer::inline v1
