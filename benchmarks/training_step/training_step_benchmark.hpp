// SPDX-License-Identifier: Apache-2.0
// The scenarios, for any device. @see HostSide, CudaSide
#pragma once

#include "../support/decoder_session.hpp"
#include "../support/random_head.hpp"
#include "../support/report.hpp"
#include "full_step_benchmark.hpp"
#include "step_bound.hpp"
#include "training_step_options.hpp"

#include <block_streamer/block/device_graph.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/train/chunked_loss.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

/// @brief A LoRA step on all linear maps, with final norm, head, chunked loss and AdamW, beside the
/// exact bound of its pipeline.
template <class Side>
class TrainingStepBenchmark {
 public:
  using Block = bs::models::DecoderBlock;
  using Context = bs::models::DecoderContext;
  using Streamer = typename DecoderSession<Side>::Streamer;

  TrainingStepBenchmark(Side& side, const TrainingStepOptions& options, Report& report)
      : side_{side},
        options_{options},
        report_{report},
        session_{side, {options.shape, options.layers, {}}} {}

  void register_all() {
    for (const std::int64_t cached : options_.cached) {
      for (const std::int64_t tokens : options_.tokens) {
        register_once(
            report_,
            "lora_step/" + std::to_string(cached + 2) + "_slots/1x" + std::to_string(tokens),
            [=, this](auto& state) {
              measure(state, static_cast<std::size_t>(cached), 1, tokens);
            });
        register_once(
            report_,
            "lora_step_graph/" + std::to_string(cached + 2) + "_slots/1x" + std::to_string(tokens),
            [=, this](auto& state) {
              measure_graph(state, static_cast<std::size_t>(cached), tokens);
            });
      }
    }
    const std::vector<std::int64_t>& together = options_.micro_batches;
    if (together.size() != 2) throw std::invalid_argument{"--micro-batches is COUNTxTOKENS"};
    if (together[0] < 2) return;
    register_once(
        report_,
        "lora_step/2_slots/" + std::to_string(together[0]) + "x" + std::to_string(together[1]),
        [=, this](auto& state) {
          measure(state, 0, static_cast<std::size_t>(together[0]), together[1]);
        });
  }

 private:
  /// What one row trains on.
  struct Batch {
    std::vector<at::Tensor> inputs;  ///< (1,T,C) each
    std::vector<Context> contexts;
    bs::TokenTargets targets;  ///< of one micro-batch
    double scored = 0;         ///< in all of them
  };

  [[nodiscard]] Batch batch_of(std::size_t count, std::int64_t tokens) {
    Batch batch;
    for (std::size_t i = 0; i < count; ++i) {
      batch.inputs.push_back(decoder_.input(tokens));
      batch.contexts.push_back(decoder_.context(tokens));
    }
    batch.targets.targets =
        at::randint(options_.vocabulary, {1, tokens}, at::detail::createCPUGenerator(5),
                    at::TensorOptions{}.dtype(at::kLong));
    batch.targets.count = static_cast<std::uint64_t>(tokens);
    batch.scored = static_cast<double>(tokens) * static_cast<double>(count);
    return batch;
  }
  [[nodiscard]] const RandomHead& head() {
    const bs::ModelConfig& config = decoder_.config();
    if (!head_)
      head_.emplace(options_.vocabulary, static_cast<std::int64_t>(config.hidden_size),
                    config.rms_norm_eps, side_.device());
    return *head_;
  }
  [[nodiscard]] at::Tensor loss_of(const at::Tensor& hidden, const Batch& batch) {
    return loss_of(hidden, batch.targets, batch.scored);
  }
  /// @param targets  TokenTargets, or ScoredTokens: what a recorded loss takes.
  template <class Targets>
  [[nodiscard]] at::Tensor loss_of(const at::Tensor& hidden, const Targets& targets,
                                   double scored) {
    const auto logits_of = [&head = head()](const at::Tensor& rows) { return head.logits(rows); };
    return bs::chunked_token_loss(logits_of, hidden, targets,
                                  static_cast<std::uint64_t>(options_.vocabulary))
        .sum.div(scored);
  }

  [[nodiscard]] Streamer& streamer(std::size_t cached) {
    Streamer& s = session_.streamer(
        cached, in_ram() ? bs::ActivationPlace::ram : bs::ActivationPlace::device);
    s.attach(decoder_.adapter().table(decoder_.lora_blocks()));
    s.train();
    return s;
  }
  [[nodiscard]] bool in_ram() const { return options_.activations == "ram"; }

  void optimize() {
    std::vector<at::Tensor> parameters = decoder_.adapter().parameters();
    ++at_step_.step;
    at_step_.learning_rate = 1e-6;
    optimizer_.step(parameters, at_step_);
    decoder_.forget_gradients();
  }
  void step(Streamer& streamer, Batch& batch) {
    std::vector<at::Tensor> outputs = streamer.forward(batch.inputs, batch.contexts);
    at::Tensor loss;
    for (at::Tensor& output : outputs) {
      const at::Tensor own = loss_of(output, batch);
      loss = loss.defined() ? loss + own : own;
      output = at::Tensor{};
    }
    loss.backward();
    optimize();
  }

  /// The same work with resident weights, stage by stage; times of all micro-batches.
  [[nodiscard]] StepParts parts_of(Batch& batch) {
    StepParts parts;
    const auto layers = static_cast<double>(decoder_.config().layer_count);
    for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
      ResidentPass pass{*this, batch.contexts[i]};
      parts.forward_s += session_.seconds_of([&] { pass.forward(batch.inputs[i]); }) / layers;
      parts.head_s += session_.seconds_of([&] { pass.head(batch); });
      parts.backward_s += session_.seconds_of([&] { pass.backward(); }) / layers;
    }
    parts.optimizer_s = session_.seconds_of([&] { optimize(); });
    return parts;
  }

  /// A step that keeps the blocks' inputs only, as a streamed one does.
  class ResidentPass {
   public:
    ResidentPass(TrainingStepBenchmark& owner, Context& context)
        : owner_{owner},
          context_{context},
          adapters_{owner.decoder_.adapter().table(owner.decoder_.lora_blocks())} {
      static_cast<void>(owner_.decoder_.resident());
    }
    void forward(const at::Tensor& input) {
      const c10::NoGradGuard no_grad;
      inputs_ = {input};
      for (std::size_t i = 0; i < owner_.decoder_.blocks().size(); ++i)
        inputs_.push_back(run(i, inputs_.back()));
    }
    void head(const Batch& batch) {
      const at::Tensor output = inputs_.back().detach().set_requires_grad(true);
      owner_.loss_of(output, batch).backward();
      gradient_ = output.grad();
      inputs_.pop_back();
    }
    void backward() {
      for (std::size_t i = owner_.decoder_.blocks().size(); i-- > 0;) {
        const at::Tensor x = inputs_[i].detach().set_requires_grad(i > 0);
        run(i, x).backward(gradient_);
        gradient_ = x.grad();
        inputs_.pop_back();
      }
    }
    /// The largest graph that a backward holds.
    void one_visit(const at::Tensor& input) {
      const at::Tensor x = input.detach().set_requires_grad(true);
      run(0, x).backward(input);
      owner_.decoder_.forget_gradients();
    }

   private:
    [[nodiscard]] at::Tensor run(std::size_t i, const at::Tensor& x) {
      woven_.clear();
      for (const auto& adapter : adapters_.blocks[i].by_weight) woven_.push_back(adapter.get());
      return owner_.decoder_.blocks()[i].forward(
          bs::Weights{owner_.decoder_.resident()[i], woven_, true}, x, context_);
    }

    TrainingStepBenchmark& owner_;
    Context& context_;
    bs::AdapterTable adapters_;
    std::vector<const bs::ProjectionAdapter*> woven_;
    std::vector<at::Tensor> inputs_;
    at::Tensor gradient_;
  };

  void measure(benchmark::State& state, std::size_t cached, std::size_t count,
               std::int64_t tokens) {
    Streamer& s = streamer(cached);
    Batch batch = batch_of(count, tokens);
    static_cast<void>(head());
    for (int i = 0; i < 2; ++i) {  // warm: kernels, allocator, residency
      step(s, batch);
      static_cast<void>(parts_of(batch));
    }
    std::vector<double> times, ratios, limits;
    StepParts parts;
    StepLink link{decoder_.config().layer_count, s.shape().slot_count, 0};
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      session_.settle();
      link.link_bytes_per_s = decoder_.link_rate();
      parts = parts_of(batch);
      const StepBound bound = step_bound(decoder_.storage().image(bs::BlockId{0}), link, parts);
      s.reset_stats();
      times.push_back(session_.seconds_of([&] { step(s, batch); }));
      if (s.statistics().fetches != bound.fetches)
        throw std::runtime_error{"a step fetched " + std::to_string(s.statistics().fetches) +
                                 " blocks, the bound " + std::to_string(bound.fetches)};
      limits.push_back(bound.time_s);
      ratios.push_back(times.back() / bound.time_s);
    }
    report_time(state, name_of(cached, count, tokens), {times, limits, ratios}, link, parts);
    report_memory(state, batch, name_of(cached, count, tokens));
  }

  /// The same step, copies included, replayed from a graph of the device; beside the eager one of
  /// the same round.
  void measure_graph(benchmark::State& state, std::size_t cached, std::int64_t tokens) {
    if (!bs::DeviceGraph<typename Side::Backend>::supported)
      return state.SkipWithError("skipped: this device has no graphs");
    if (options_.activations != "device")
      return state.SkipWithError("skipped: inputs of blocks wait elsewhere than on the device");
    Streamer& s = streamer(cached);
    Batch batch = batch_of(1, tokens);
    auto captured = s.capture_step(
        [this, scored = batch.scored](const at::Tensor& hidden, std::span<const at::Tensor> given) {
          return loss_of(hidden, bs::ScoredTokens{given[0], given[1]}, scored);
        },
        batch.contexts[0]);
    const bs::ScoredTokens scored = bs::scored_tokens(batch.targets, side_.device());
    const auto graph_step = [&] {
      static_cast<void>(captured.run(batch.inputs[0], {scored.positions, scored.wanted}));
      optimize();
    };
    for (int i = 0; i < 2; ++i) {  // the first records
      step(s, batch);
      graph_step();
      static_cast<void>(parts_of(batch));
    }
    std::vector<double> times, eager, ratios, limits;
    StepParts parts;
    StepLink link{decoder_.config().layer_count, s.shape().slot_count, 0};
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      session_.settle();
      link.link_bytes_per_s = decoder_.link_rate();
      parts = parts_of(batch);
      const StepBound bound = step_bound(decoder_.storage().image(bs::BlockId{0}), link, parts);
      eager.push_back(session_.seconds_of([&] { step(s, batch); }));
      graph_step();  // its blocks are in its slots again
      s.reset_stats();
      times.push_back(session_.seconds_of(graph_step));
      if (s.statistics().fetches != bound.fetches)
        throw std::runtime_error{"a recorded step fetched " +
                                 std::to_string(s.statistics().fetches) + " blocks, the bound " +
                                 std::to_string(bound.fetches)};
      limits.push_back(bound.time_s);
      ratios.push_back(times.back() / bound.time_s);
    }
    report_graph(state, name_of(cached, 1, tokens), {times, limits, ratios}, eager);
  }

  [[nodiscard]] static std::string name_of(std::size_t cached, std::size_t count,
                                           std::int64_t tokens) {
    return std::to_string(count) + "x" + std::to_string(tokens) + ", " +
           std::to_string(cached + 2) + " slots";
  }
  struct Times {
    std::vector<double> steps, limits, ratios;
  };
  void report_time(benchmark::State& state, const std::string& name, const Times& times,
                   const StepLink& link, const StepParts& parts) {
    state.SetIterationTime(median(times.steps));
    state.counters["link_GB_per_s"] = link.link_bytes_per_s / 1e9;
    state.counters["forward_ms"] = parts.forward_s * 1e3;
    state.counters["backward_ms"] = parts.backward_s * 1e3;
    state.counters["head_ms"] = parts.head_s * 1e3;
    state.counters["optimizer_ms"] = parts.optimizer_s * 1e3;
    const auto [least, most] = std::minmax_element(times.ratios.begin(), times.ratios.end());
    char note[200];
    std::snprintf(
        note, sizeof note,
        "(%.3f ... %.3f) block %.2f + %.2f, copy %.2f, head %.1f, AdamW %.1f ms; resident %.1f ms",
        *least, *most, parts.forward_s * 1e3, parts.backward_s * 1e3,
        static_cast<double>(decoder_.block_bytes()) / link.link_bytes_per_s * 1e3,
        parts.head_s * 1e3, parts.optimizer_s * 1e3, parts.compute_s(link.layers) * 1e3);
    report_.add(state, {"LoRA step " + name + " / recurrence", median(times.steps) * 1e3, "ms",
                        median(times.limits) * 1e3, median(times.ratios),
                        Side::is_device ? std::optional{at_most(1.03)} : std::nullopt, note});
    report_.add({"bytes copied, " + name,
                 static_cast<double>(session_.current().statistics().bytes_copied) / 1e9, "GB"});
  }

  void report_graph(benchmark::State& state, const std::string& name, const Times& times,
                    const std::vector<double>& eager) {
    state.SetIterationTime(median(times.steps));
    state.counters["eager_ms"] = median(eager) * 1e3;
    const auto [least, most] = std::minmax_element(times.ratios.begin(), times.ratios.end());
    char note[120];
    std::snprintf(note, sizeof note, "(%.3f ... %.3f) eager %.2f ms, graph / eager %.3f", *least,
                  *most, median(eager) * 1e3, median(times.steps) / median(eager));
    report_.add(state,
                {"LoRA step, graph, " + name + " / recurrence", median(times.steps) * 1e3, "ms",
                 median(times.limits) * 1e3, median(times.ratios), std::nullopt, note});
  }

  /// What the device holds at most, against what a step needs: what is resident, the slots, the
  /// inputs that wait, and the larger of one block's graph and the head's chunk.
  void report_memory(benchmark::State& state, Batch& batch, const std::string& name) {
    if (!Side::is_device) return;
    const double weights = static_cast<double>(decoder_.all_bytes());  // of the resident reference
    const double input = static_cast<double>(batch.inputs[0].nbytes());
    const double stored = (in_ram() ? 2.0 : static_cast<double>(decoder_.config().layer_count)) *
                          input * static_cast<double>(batch.inputs.size());
    const double visit =
        std::max(peak_of([&] { one_block(batch); }), peak_of([&] { one_head(batch); }));
    const double peak = peak_of([&] { step(session_.current(), batch); });
    const double others = static_cast<double>(side_.allocated()) - weights;
    const double slots = static_cast<double>(session_.current().shape().slot_count *
                                             session_.current().shape().slot_byte_count);
    const double measured = others + peak + static_cast<double>(side_.backend_bytes());
    const double stated = others + slots + stored + visit;
    char note[120];
    std::snprintf(note, sizeof note,
                  "resident %.0f + slots %.0f + inputs %.0f + one visit %.0f MiB", others / mib,
                  slots / mib, stored / mib, visit / mib);
    // Not to the state: its achieved, limit and ratio are the step's time.
    state.counters["device_MiB"] = measured / mib;
    report_.add({"device bytes, " + name, measured / mib, "MiB", stated / mib, measured / stated,
                 std::nullopt, note});
  }
  void one_block(Batch& batch) {
    ResidentPass pass{*this, batch.contexts[0]};
    pass.one_visit(batch.inputs[0]);
  }
  void one_head(Batch& batch) {
    const at::Tensor output = batch.inputs[0].detach().clone().set_requires_grad(true);
    loss_of(output, batch).backward();
  }
  template <class Work>
  [[nodiscard]] double peak_of(Work&& work) {
    session_.settle();
    const double before = static_cast<double>(side_.allocated());
    side_.reset_peak();
    work();
    session_.settle();
    return static_cast<double>(side_.peak()) - before;
  }

  static constexpr double mib = 1048576;

  Side& side_;
  TrainingStepOptions options_;
  Report& report_;
  DecoderSession<Side> session_;
  RandomDecoder<Side>& decoder_ = session_.decoder();
  std::optional<RandomHead> head_;
  bs::AdamW optimizer_;
  bs::StepContext at_step_{.step = 0};
};

/// @brief Registers the scenarios and runs what the command line selects.
template <class Side>
void run_training_step(Side& side, const TrainingStepOptions& options, Report& report) {
  TrainingStepBenchmark<Side> scenarios{side, options, report};
  scenarios.register_all();
  std::optional<FullStepBenchmark<Side>> full;
  if (options.full_shape != "none") full.emplace(side, options, report).register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::ClearRegisteredBenchmarks();
}

}  // namespace block_streamer_benchmarks
