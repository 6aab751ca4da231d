// SPDX-License-Identifier: Apache-2.0
// The scenarios, for any device: a Side gives the backend, its synchronization, the copy probe and
// the memory figures.
#pragma once

#include "../support/checkpointed_step.hpp"
#include "../support/decoder_session.hpp"
#include "../support/deterministic.hpp"
#include "../support/report.hpp"
#include "link_options.hpp"

#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

template <class Side>
class LinkBenchmark {
 public:
  using Block = bs::models::DecoderBlock;
  using Streamer = typename DecoderSession<Side>::Streamer;

  LinkBenchmark(Side& side, const LinkOptions& options, Report& report)
      : side_{side},
        options_{options},
        report_{report},
        session_{side, {options.shape, options.layers, options.in_memory ? "" : options.folder}} {}

  /// @brief What streams comes first: where time runs out, the rest is the reference.
  void register_all() {
    const std::int64_t few = options_.short_tokens, many = options_.long_tokens;
    const std::size_t layers = decoder_.config().layer_count;
    const std::size_t half = layers > 4 ? layers / 2 - 2 : 0;  // 16 of 36: 18 slots with the two
    const auto add = [this](const std::string& name, auto body) {
      register_once(report_, name, std::move(body));
    };
    add("host_memory", [this](auto& state) { page_locked(state); });
    add("forward/1x" + std::to_string(few), [=, this](auto& s) { streamed_forward(s, few); });
    add("forward/1x" + std::to_string(many), [=, this](auto& s) { streamed_forward(s, many); });
    add("forward/" + size_of(options_.batch, many),
        [=, this](auto& s) { forward_behind_compute(s, options_.batch, many); });
    add("lora_step/2_slots", [=, this](auto& s) { lora_step(s, 0, 1.05); });
    add("lora_step/2_slots_adamw", [this](auto& s) { lora_step_adamw(s); });
    add("lora_step/" + std::to_string(half + 2) + "_slots",
        [=, this](auto& s) { lora_step(s, half, 1.08); });
    add("resident/forward/1x" + std::to_string(few),
        [=, this](auto& s) { resident_forward(s, few); });
    add("resident/forward/1x" + std::to_string(many),
        [=, this](auto& s) { resident_forward(s, many); });
    add("resident/lora_step", [this](auto& s) { resident_step(s, false); });
    add("resident/lora_step_recomputing", [this](auto& s) { resident_step(s, true); });
    add("same_bits", [this](auto& s) { same_bits(s); });
    if (Side::is_device) register_memory(few, many);
  }

 private:
  using Tensors = std::vector<at::Tensor>;

  void register_memory(std::int64_t few, std::int64_t many) {
    for (const std::int64_t tokens : {few, many}) {
      register_once(report_, "device_memory/forward/1x" + std::to_string(tokens),
                    [=, this](auto& s) { memory_of_forward(s, tokens); });
    }
    for (const bool recompute : {false, true}) {
      register_once(report_,
                    std::string{"device_memory/lora_step"} + (recompute ? "_recomputing" : ""),
                    [=, this](auto& s) { memory_of_step(s, recompute); });
    }
  }

  [[nodiscard]] Streamer& evaluating(std::size_t cached = 0) {
    Streamer& s = session_.streamer(cached);
    s.attach(bs::AdapterTable{});
    s.eval();
    return s;
  }
  [[nodiscard]] Streamer& training(std::size_t cached = 0) {
    Streamer& s = session_.streamer(cached);
    s.attach(decoder_.adapter().table(decoder_.lora_blocks()));
    s.train();
    return s;
  }

  // ---- measuring

  [[nodiscard]] static std::string size_of(std::int64_t batch, std::int64_t tokens) {
    return std::to_string(batch) + "x" + std::to_string(tokens);
  }
  /// Bars on time are about devices; elsewhere the program is only tried out.
  [[nodiscard]] static std::optional<Bar> bar(Bar of_devices) {
    return Side::is_device ? std::optional{of_devices} : std::nullopt;
  }

  struct Measured {
    double time_s = 0;  ///< median
    double link_bytes_per_s = 0;
    std::uint64_t copied = 0;   ///< in one run
    std::uint64_t fetches = 0;  ///< in one run
  };
  /// Probe and run in turn.
  /// @throws std::runtime_error if one run moves other than `fetches` blocks.
  /// @param beside  what else belongs into a round, before the run.
  template <class Work>
  [[nodiscard]] Measured alternate(
      Streamer& streamer, std::uint64_t fetches, Work&& work,
      const std::function<void()>& beside = [] {}) {
    for (int i = 0; i < 2; ++i)
      (void)session_.seconds_of(work);  // warm: kernels, allocator, residency
    std::vector<double> times, rates;
    Measured result;
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      session_.settle();
      rates.push_back(decoder_.link_rate());
      beside();
      streamer.reset_stats();
      times.push_back(session_.seconds_of(work));
      result.copied = streamer.statistics().bytes_copied;
      result.fetches = streamer.statistics().fetches;
      if (result.fetches != fetches) {
        throw std::runtime_error{"one run fetched " + std::to_string(result.fetches) +
                                 " blocks, not " + std::to_string(fetches)};
      }
    }
    result.time_s = median(times);
    result.link_bytes_per_s = median(rates);
    return result;
  }
  void count(benchmark::State& state, const Measured& m) {
    state.SetIterationTime(m.time_s);
    state.SetBytesProcessed(static_cast<std::int64_t>(m.copied));
    state.counters["fetches"] = static_cast<double>(m.fetches);
    state.counters["link_GB_per_s"] = m.link_bytes_per_s / 1e9;
  }

  [[nodiscard]] at::Tensor run_streamed(const at::Tensor& x, bs::models::DecoderContext& c) {
    return session_.current().forward(x, c);
  }
  /// Stands for a head.
  [[nodiscard]] static at::Tensor loss_of(const at::Tensor& output) {
    return output.to(at::kFloat).square().mean();
  }
  /// Forward and backward.
  template <class Forward>
  void step(Forward&& forward) {
    decoder_.forget_gradients();
    loss_of(forward()).backward();
  }
  void step_resident(const at::Tensor& x, bs::models::DecoderContext& c,
                     const bs::AdapterTable& table, bool recompute) {
    if (!recompute) return step([&] { return decoder_.run_resident(x, c, &table); });
    decoder_.forget_gradients();
    checkpointed_step<Block>(decoder_.blocks(), decoder_.resident(), x, c, table, loss_of);
  }

  // ---- scenarios

  void page_locked(benchmark::State& state) {
    const bs::TransferShape& shape = evaluating().shape();
    std::uint64_t locked = 0;
    if (shape.chunk_byte_count == 0) {
      for (const auto& region : decoder_.storage().regions()) locked += region.size();
    } else {
      locked = shape.chunk_byte_count * shape.ticket_count;
    }
    state.SetIterationTime(1e-9);
    const auto weights = static_cast<double>(decoder_.all_bytes());
    report_.add(
        state, {"page-locked bytes / weight bytes", static_cast<double>(locked) / 1073741824.0,
                "GiB", weights / 1073741824.0, static_cast<double>(locked) / weights, at_most(1.02),
                shape.chunk_byte_count == 0 ? "" : "registration refused: staged"});
  }

  void streamed_forward(benchmark::State& state, std::int64_t tokens) {
    Streamer& s = evaluating();
    const c10::NoGradGuard no_grad;
    const at::Tensor x = decoder_.input(tokens);
    auto c = decoder_.context(tokens);
    const Measured m =
        alternate(s, decoder_.config().layer_count, [&] { (void)run_streamed(x, c); });
    count(state, m);
    const double rate = static_cast<double>(m.copied) / m.time_s;
    report_.add(state, {"forward 1x" + std::to_string(tokens) + ", share of memcpy", rate / 1e9,
                        "GB/s", m.link_bytes_per_s / 1e9, rate / m.link_bytes_per_s,
                        bar(at_least(0.985)), std::to_string(m.time_s) + " s"});
  }

  /// Where computing takes longer than copying, nothing but the first copy may be seen.
  void forward_behind_compute(benchmark::State& state, std::int64_t batch, std::int64_t tokens) {
    Streamer& s = evaluating();
    const c10::NoGradGuard no_grad;
    const at::Tensor x = decoder_.input(tokens, batch);
    auto c = decoder_.context(tokens, batch);
    std::vector<double> resident;
    (void)decoder_.run_resident(x, c, nullptr);
    const Measured m = alternate(
        s, decoder_.config().layer_count, [&] { (void)run_streamed(x, c); },
        [&] {
          resident.push_back(
              session_.seconds_of([&] { (void)decoder_.run_resident(x, c, nullptr); }));
        });
    count(state, m);
    const double copy = static_cast<double>(decoder_.block_bytes()) / m.link_bytes_per_s;
    const double limit =
        std::max(copy + median(resident), static_cast<double>(m.copied) / m.link_bytes_per_s);
    report_.add(state, {"forward " + size_of(batch, tokens) + " / (first copy + resident)",
                        m.time_s * 1e3, "ms", limit * 1e3, m.time_s / limit, bar(at_most(1.01))});
  }

  void lora_step(benchmark::State& state, std::size_t cached, double most) {
    Streamer& s = training(cached);
    const at::Tensor x = decoder_.input(options_.short_tokens);
    auto c = decoder_.context(options_.short_tokens);
    const std::uint64_t slots = s.shape().slot_count;
    const Measured m = alternate(s, 2 * (decoder_.config().layer_count - slots),
                                 [&] { step([&] { return run_streamed(x, c); }); });
    count(state, m);
    const double limit = static_cast<double>(m.copied) / m.link_bytes_per_s;
    report_.add(state, {"LoRA step 1x" + std::to_string(options_.short_tokens) + ", " +
                            std::to_string(slots) + " slots / its " + std::to_string(m.fetches) +
                            " fetches",
                        m.time_s * 1e3, "ms", limit * 1e3, m.time_s / limit, bar(at_most(most))});
  }

  void lora_step_adamw(benchmark::State& state) {
    Streamer& s = training();
    const at::Tensor x = decoder_.input(options_.short_tokens);
    auto c = decoder_.context(options_.short_tokens);
    bs::AdamW optimizer;
    std::vector<at::Tensor> parameters = decoder_.adapter().parameters();
    bs::StepContext at_step{.step = 0};
    at_step.learning_rate = 1e-5;
    const Measured m =
        alternate(s, 2 * (decoder_.config().layer_count - s.shape().slot_count), [&] {
          step([&] { return run_streamed(x, c); });
          ++at_step.step;
          optimizer.step(parameters, at_step);
        });
    count(state, m);
    const double limit = static_cast<double>(m.copied) / m.link_bytes_per_s;
    report_.add(state,
                {"the same with AdamW", m.time_s * 1e3, "ms", limit * 1e3, m.time_s / limit});
  }

  void resident_forward(benchmark::State& state, std::int64_t tokens) {
    const c10::NoGradGuard no_grad;
    const at::Tensor x = decoder_.input(tokens);
    auto c = decoder_.context(tokens);
    time_resident(state, "resident forward 1x" + std::to_string(tokens),
                  [&] { (void)decoder_.run_resident(x, c, nullptr); });
  }
  void resident_step(benchmark::State& state, bool recompute) {
    const at::Tensor x = decoder_.input(options_.short_tokens);
    auto c = decoder_.context(options_.short_tokens);
    const bs::AdapterTable table = decoder_.adapter().table(decoder_.lora_blocks());
    time_resident(state,
                  "resident LoRA step 1x" + std::to_string(options_.short_tokens) +
                      (recompute ? ", recomputing" : ""),
                  [&] { step_resident(x, c, table, recompute); });
  }
  template <class Work>
  void time_resident(benchmark::State& state, const std::string& what, Work&& work) {
    for (int i = 0; i < 2; ++i) (void)session_.seconds_of(work);
    std::vector<double> times;
    for (std::size_t i = 0; i < options_.rounds; ++i) times.push_back(session_.seconds_of(work));
    state.SetIterationTime(median(times));
    report_.add(state, {what, median(times) * 1e3, "ms"});
  }

  /// Output, then all gradients, on the host.
  template <class Forward>
  [[nodiscard]] Tensors results_of(Forward&& forward) {
    Tensors results;
    step([&] {
      at::Tensor output = forward();
      results.push_back(output.detach().cpu());
      return output;
    });
    for (const at::Tensor& p : decoder_.adapter().parameters()) {
      if (!p.grad().defined()) throw std::runtime_error{"a parameter got no gradient"};
      results.push_back(p.grad().cpu());
    }
    session_.settle();
    return results;
  }
  [[nodiscard]] static std::size_t differing(const Tensors& a, const Tensors& b) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < a.size(); ++i) count += at::equal(a[i], b[i]) ? 0 : 1;
    return count;
  }
  void same_bits(benchmark::State& state) {
    std::string note = "strict deterministic algorithms";
    try {
      compare_bits(state, /*strict=*/true, note);
    } catch (const std::exception& error) {
      note = "without cuDNN attention; strict refused: " + std::string{error.what()}.substr(0, 120);
      compare_bits(state, /*strict=*/false, note);
    }
  }
  void compare_bits(benchmark::State& state, bool strict, const std::string& note) {
    const Deterministic deterministic{strict};
    const at::Tensor x = decoder_.input(options_.short_tokens);
    auto c = decoder_.context(options_.short_tokens);
    const bs::AdapterTable table = decoder_.adapter().table(decoder_.lora_blocks());
    const Tensors first = results_of([&] { return decoder_.run_resident(x, c, &table); });
    const Tensors second = results_of([&] { return decoder_.run_resident(x, c, &table); });
    (void)training();
    const Tensors streamed = results_of([&] { return run_streamed(x, c); });
    if (!at::isfinite(first.front()).all().item<bool>()) {
      throw std::runtime_error{"the output is not finite: the comparison proves nothing"};
    }
    state.SetIterationTime(1e-9);
    report_.add({"resident runs that differ, of " + std::to_string(first.size()) + " tensors",
                 static_cast<double>(differing(first, second)),
                 " ",
                 {},
                 {},
                 at_most(0),
                 note});
    report_.add(state, {"streamed tensors that differ from resident",
                        static_cast<double>(differing(first, streamed)),
                        " ",
                        {},
                        {},
                        at_most(0),
                        "output and gradients, bit for bit"});
  }

  // ---- device memory

  void memory_of_forward(benchmark::State& state, std::int64_t tokens) {
    const c10::NoGradGuard no_grad;
    const at::Tensor x = decoder_.input(tokens);
    auto c = decoder_.context(tokens);
    (void)evaluating();
    decoder_.forget_gradients();
    compare_memory(
        state, "device bytes, forward 1x" + std::to_string(tokens),
        [&] { (void)decoder_.run_resident(x, c, nullptr); }, [&] { (void)run_streamed(x, c); });
  }
  void memory_of_step(benchmark::State& state, bool recompute) {
    const at::Tensor x = decoder_.input(options_.short_tokens);
    auto c = decoder_.context(options_.short_tokens);
    const bs::AdapterTable table = decoder_.adapter().table(decoder_.lora_blocks());
    (void)training();
    compare_memory(
        state, std::string{"device bytes, LoRA step"} + (recompute ? ", resident recomputing" : ""),
        [&] { step_resident(x, c, table, recompute); },
        [&] { step([&] { return run_streamed(x, c); }); });
  }
  /// What a run allocates at its peak beyond what was allocated when it began.
  template <class Work>
  [[nodiscard]] double peak_of(Work&& work) {
    work();  // gradients and workspaces exist
    session_.settle();
    const double before = static_cast<double>(side_.allocated());
    side_.reset_peak();
    work();
    session_.settle();
    return static_cast<double>(side_.peak()) - before;
  }
  template <class Resident, class Streamed>
  void compare_memory(benchmark::State& state, const std::string& what, Resident&& resident_run,
                      Streamed&& streamed_run) {
    const double resident_peak = peak_of(resident_run);
    const double streamed_peak = peak_of(streamed_run);
    // The weights of the reference are no part of a streamed run.
    const double others =
        static_cast<double>(side_.allocated()) - static_cast<double>(decoder_.all_bytes());
    const auto ours = static_cast<double>(side_.backend_bytes());
    const auto slots = static_cast<double>(session_.current().shape().slot_count *
                                           session_.current().shape().slot_byte_count);
    const double achieved = others + streamed_peak + ours;
    const double limit = others + slots + resident_peak;
    constexpr double mib = 1048576;
    state.SetIterationTime(1e-9);
    state.counters["arena_MiB"] = ours / mib;
    state.counters["activations_MiB"] = streamed_peak / mib;
    state.counters["resident_activations_MiB"] = resident_peak / mib;
    char note[96];
    std::snprintf(note, sizeof note, "arena %.1f + activations %.1f (resident %.1f) MiB",
                  ours / mib, streamed_peak / mib, resident_peak / mib);
    report_.add(state,
                {what, achieved / mib, "MiB", limit / mib, achieved / limit, at_most(1.01), note});
  }

  Side& side_;
  LinkOptions options_;
  Report& report_;
  DecoderSession<Side> session_;
  RandomDecoder<Side>& decoder_ = session_.decoder();
};

/// @brief Registers the scenarios and runs what the command line selects.
template <class Side>
void run_link(Side& side, const LinkOptions& options, Report& report) {
  LinkBenchmark<Side> scenarios{side, options, report};
  scenarios.register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::ClearRegisteredBenchmarks();
}

}  // namespace block_streamer_benchmarks
