// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/random_model.hpp"
#include "../support/report.hpp"
#include "step_bound.hpp"
#include "training_step_options.hpp"

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/models/decoder_block.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

/// @brief A step that trains all parameters of a decoder: fp32 masters in host memory, blocks that
/// compute in bf16, AdamW on the host inside the backward, beside the exact bound of its stages.
template <class Side>
class FullStepBenchmark {
 public:
  using Block = bs::models::DecoderBlock;
  using Context = bs::models::DecoderContext;
  using Streamer = bs::Streamer<Block, bs::MasterStorage, bs::AdamW, typename Side::Backend>;

  FullStepBenchmark(Side& side, const TrainingStepOptions& options, Report& report)
      : side_{side},
        options_{options},
        report_{report},
        config_{model_of(options.full_shape, options.layers)} {}

  void register_all() {
    register_once(report_, "full_step/2_slots/1x" + std::to_string(options_.full_tokens),
                  [this](auto& state) { measure(state); });
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Tensors = std::vector<at::Tensor>;

  [[nodiscard]] std::vector<bs::NamedTensor> random_masters() const {
    std::vector<bs::NamedTensor> masters;
    for (const bs::ExpectedTensor& tensor : bs::decoder_block_tensors(config_)) {
      const std::vector<std::int64_t> shape(tensor.shape.begin(), tensor.shape.end());
      const at::Tensor values = shape.size() == 1 ? at::ones(shape) : at::randn(shape).mul_(0.02);
      masters.push_back({tensor.name, values.set_requires_grad(true)});
    }
    return masters;
  }
  void prepare() {
    std::vector<std::vector<bs::NamedTensor>> masters;
    for (std::size_t i = 0; i < config_.layer_count; ++i) {
      blocks_.emplace_back(config_, i);
      masters.push_back(random_masters());
    }
    first_ = masters.front();
    bs::MasterStorage storage{masters};
    for (std::size_t i = 0; i < config_.layer_count; ++i)
      bytes_.push_back(storage.bytes(bs::block_at(i)));
    image_ = storage.image(bs::BlockId{0});
    bs::StreamerOptions options;
    options.prefetch_ahead = 1;
    options.dtype = bs::DType::bf16;
    streamer_.emplace(blocks_, std::move(storage), side_.backend(), options, bs::AdamW{});
    streamer_->train();
    input_ = at::randn({1, options_.full_tokens, static_cast<std::int64_t>(config_.hidden_size)})
                 .to(side_.device(), at::kBFloat16);  // (1,T,C)
    context_ = bs::models::make_context(
        1, options_.full_tokens, bs::models::rotary_frequencies_of(config_).to(side_.device()),
        at::kBFloat16);
    for (const bs::NamedTensor& master : first_)
      on_device_.push_back(
          master.tensor.detach().to(side_.device(), at::kFloat, false, /*copy=*/true));
  }

  [[nodiscard]] static at::Tensor loss_of(const at::Tensor& output) {
    return output.to(at::kFloat).square().mean();
  }
  void step() {
    streamer_->begin_step({++steps_, 1e-6, 1});
    loss_of(streamer_->forward(input_, context_)).backward();
    streamer_->end_step();
  }

  void settle() {
    streamer_->drain();
    side_.synchronize();
  }
  template <class Work>
  [[nodiscard]] double seconds_of(Work&& work) {
    settle();
    const auto begin = Clock::now();
    work();
    settle();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  [[nodiscard]] double link_rate() {
    auto probe = side_.probe(bytes_.front().size());
    std::uint64_t total = 0;
    const double time = seconds_of([&] {
      for (std::size_t i = 0; i < bytes_.size(); ++i) {
        probe.copy(bytes_[i], i % 2);
        total += bytes_[i].size();
      }
      probe.finish();
    });
    return static_cast<double>(total) / time;
  }
  /// Blocks are computed again and again with the same weights, converted each time as a visit
  /// does.
  [[nodiscard]] Tensors converted(bool train) const {
    Tensors weights;
    for (const at::Tensor& weight : on_device_)
      weights.push_back(weight.to(at::kBFloat16).set_requires_grad(train));
    return weights;
  }
  [[nodiscard]] StepParts parts() {
    const auto layers = static_cast<double>(blocks_.size());
    StepParts result;
    result.forward_s =
        seconds_of([&] {
          const c10::NoGradGuard no_grad;
          for (Block& block : blocks_)
            (void)block.forward(bs::Weights{converted(false), {}, true}, input_, context_);
        }) /
        layers;
    result.backward_s = seconds_of([&] {
                          for (Block& block : blocks_) {
                            const Tensors weights = converted(true);
                            block
                                .forward(bs::Weights{weights, {}, true},
                                         input_.detach().set_requires_grad(true), context_)
                                .backward(input_);
                            for (const at::Tensor& weight : weights)
                              (void)weight.grad().to(at::kFloat);
                          }
                        }) /
                        layers;
    return result;
  }
  [[nodiscard]] GradientExitTimes exit_times() {
    GradientExitTimes result;
    Tensors parameters, gradients;
    for (const bs::NamedTensor& master : first_) {
      parameters.push_back(master.tensor.detach().clone());
      gradients.push_back(at::zeros(master.tensor.sizes()));
    }
    bs::AdamW optimizer;
    const auto update = [&](std::uint64_t step) {
      optimizer.begin_step({step, 1e-6, 1});
      optimizer.update(bs::BlockId{0}, parameters, gradients);
      optimizer.end_step();
    };
    update(1);  // makes the state
    result.update_s = seconds_of([&] {
                        for (std::uint64_t i = 0; i < 8; ++i) update(2 + i);
                      }) /
                      8;
    if (!Side::is_device) return result;
    const auto elements = static_cast<std::int64_t>(bytes_.front().size() / 4);
    const at::Tensor device = at::zeros({elements}, at::TensorOptions{}.device(side_.device()));
    at::Tensor host = at::empty({elements}, at::TensorOptions{}.pinned_memory(true));
    host.copy_(device);
    result.copy_out_s = seconds_of([&] {
                          for (int i = 0; i < 8; ++i) host.copy_(device, /*non_blocking=*/true);
                        }) /
                        8;
    return result;
  }

  void measure(benchmark::State& state) {
    prepare();
    for (int i = 0; i < 2; ++i) {  // warm: kernels, allocator, the optimizer's state
      step();
      (void)parts();
    }
    std::vector<double> times, limits, ratios;
    StepLink link{blocks_.size(), streamer_->shape().slot_count, 0, /*keeps_residency=*/false};
    StepParts compute;
    GradientExitTimes exit;
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      link.link_bytes_per_s = link_rate();
      compute = parts();
      exit = exit_times();
      const StepBound bound = full_step_bound(image_, link, compute, exit);
      streamer_->reset_stats();
      times.push_back(seconds_of([&] { step(); }));
      if (streamer_->statistics().fetches != bound.fetches)
        throw std::runtime_error{"a step fetched " +
                                 std::to_string(streamer_->statistics().fetches) +
                                 " blocks, the bound " + std::to_string(bound.fetches)};
      limits.push_back(bound.time_s);
      ratios.push_back(times.back() / bound.time_s);
    }
    report(state, {times, limits, ratios}, link, compute, exit);
  }
  struct Times {
    std::vector<double> steps, limits, ratios;
  };
  void report(benchmark::State& state, const Times& times, const StepLink& link,
              const StepParts& parts, const GradientExitTimes& exit) {
    state.SetIterationTime(median(times.steps));
    char note[240];
    std::snprintf(
        note, sizeof note, "a block: in %.2f, forward %.2f, backward %.2f, out %.2f, AdamW %.2f ms",
        static_cast<double>(bytes_.front().size()) / link.link_bytes_per_s * 1e3,
        parts.forward_s * 1e3, parts.backward_s * 1e3, exit.copy_out_s * 1e3, exit.update_s * 1e3);
    report_.add(state, {"full step 1x" + std::to_string(options_.full_tokens) + ", " +
                            options_.full_shape + " / recurrence",
                        median(times.steps) * 1e3, "ms", median(times.limits) * 1e3,
                        median(times.ratios), std::nullopt, note});
  }

  Side& side_;
  TrainingStepOptions options_;
  Report& report_;
  bs::ModelConfig config_;
  std::vector<Block> blocks_;
  std::vector<bs::NamedTensor> first_;  ///< masters of block 0
  std::vector<std::span<const std::byte>> bytes_;
  bs::BlockImage image_;
  std::optional<Streamer> streamer_;
  at::Tensor input_;
  Context context_;
  Tensors on_device_;  ///< block 0's, fp32
  std::uint64_t steps_ = 0;
};

}  // namespace block_streamer_benchmarks
