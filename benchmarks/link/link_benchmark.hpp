// SPDX-License-Identifier: Apache-2.0
// The scenarios, for any device: a Side gives the backend, its synchronization, the copy probe and
// the memory figures.
#pragma once

#include "../support/checkpointed_step.hpp"
#include "../support/report.hpp"
#include "link_options.hpp"
#include "random_model.hpp"

#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/randn.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
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
  using Streamer = bs::Streamer<Block, BorrowedRam, bs::ExternalOptimizer, typename Side::Backend>;

  LinkBenchmark(Side& side, const LinkOptions& options, Report& report)
      : side_{side},
        options_{options},
        report_{report},
        config_{model_of(options.shape, options.layers)} {
    for (std::size_t i = 0; i < config_.layer_count; ++i) {
      blocks_.emplace_back(config_, i);
      lora_blocks_.push_back({bs::decoder_block_prefix(i), blocks_.back().weight_specs()});
    }
  }

  /// @brief What streams comes first: where time runs out, the rest is the reference.
  void register_all() {
    const std::int64_t few = options_.short_tokens, many = options_.long_tokens;
    const std::size_t layers = config_.layer_count;
    const std::size_t half = layers > 4 ? layers / 2 - 2 : 0;  // 16 of 36: 18 slots with the two
    const auto add = [this](const std::string& name, auto body) {
      register_once(report_, name, std::move(body));
    };
    add("host_memory", [this](auto& state) { page_locked(state); });
    add("forward/1x" + std::to_string(few), [=, this](auto& s) { streamed_forward(s, few); });
    add("forward/1x" + std::to_string(many), [=, this](auto& s) { streamed_forward(s, many); });
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
  using Clock = std::chrono::steady_clock;
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

  // ---- what the scenarios share, made when first needed

  [[nodiscard]] bs::RamStorage& storage() {
    if (storage_) return *storage_;
    const std::filesystem::path folder = options_.folder;
    if (options_.in_memory) {
      storage_.emplace(random_blocks(config_));
    } else {
      if (!std::filesystem::exists(folder / "model.safetensors.index.json")) {
        bs::RamStorage written = random_blocks(config_);
        write_checkpoint(folder, written);
      }
      storage_.emplace(load_checkpoint(folder, config_));
    }
    return *storage_;
  }
  [[nodiscard]] std::uint64_t block_bytes() {
    return storage().image(bs::BlockId{0}).layout.slot_byte_count[0];
  }
  [[nodiscard]] std::uint64_t all_bytes() { return block_bytes() * config_.layer_count; }

  /// The streamer with a budget of so many cached blocks; one at a time, since each page-locks.
  [[nodiscard]] Streamer& streamer(std::size_t cached) {
    if (streamer_ && cached_ == cached) return *streamer_;
    streamer_.reset();
    bs::StreamerOptions options;
    options.prefetch_ahead = 1;
    options.device_budget = cached * bs::round_up(block_bytes(), bs::tensor_alignment);
    streamer_.emplace(blocks_, BorrowedRam{storage()}, side_.backend(), options);
    cached_ = cached;
    return *streamer_;
  }
  [[nodiscard]] Streamer& evaluating(std::size_t cached = 0) {
    Streamer& s = streamer(cached);
    s.attach(bs::AdapterTable{});
    s.eval();
    return s;
  }
  [[nodiscard]] Streamer& training(std::size_t cached = 0) {
    Streamer& s = streamer(cached);
    s.attach(adapter().table(lora_blocks_));
    s.train();
    return s;
  }

  [[nodiscard]] const bs::LoraAdapter& adapter() {
    if (!adapter_) {
      bs::LoraOptions options;  // rank 16, all linear maps
      adapter_ = bs::make_lora_adapter(lora_blocks_, options, side_.device());
      const c10::NoGradGuard no_grad;  // B is zero at first: A would get no gradient
      for (const bs::LoraModule& module : adapter_->modules()) {
        const at::Tensor b = at::randn(module.b.sizes(), at::detail::createCPUGenerator(3),
                                       at::TensorOptions{}.dtype(at::kFloat));
        at::Tensor leaf = module.b;
        leaf.copy_(b.mul(0.01));
      }
    }
    return *adapter_;
  }
  [[nodiscard]] std::vector<Tensors>& resident() {
    if (!resident_.empty()) return resident_;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      Tensors& weights = resident_.emplace_back();
      const bs::BlockLayout& layout = storage().image(bs::block_at(i)).layout;
      for (const bs::WeightSpec& spec : blocks_[i].weight_specs()) {
        const bs::TensorPlacement& place = *layout.find(spec.name);
        const at::Tensor host = bs::view_of(storage().writable_bytes(bs::block_at(i), place),
                                            place.spec, at::Device{at::kCPU});
        weights.push_back(host.to(side_.device(), host.scalar_type(), false, /*copy=*/true));
      }
    }
    return resident_;
  }
  [[nodiscard]] at::Tensor input(std::int64_t tokens) const {
    return at::randn({1, tokens, static_cast<std::int64_t>(config_.hidden_size)},
                     at::detail::createCPUGenerator(1), at::TensorOptions{}.dtype(at::kFloat))
        .to(side_.device(), at::kBFloat16);  // (1,T,C)
  }
  [[nodiscard]] bs::models::DecoderContext context(std::int64_t tokens) const {
    const at::Tensor frequencies = bs::models::rotary_frequencies_of(config_).to(side_.device());
    return bs::models::make_context(1, tokens, frequencies, at::kBFloat16);
  }

  // ---- measuring

  void settle() {
    if (streamer_) streamer_->drain();
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
  /// Bytes a second of plain copies of all blocks out of the tier's own, page-locked memory.
  [[nodiscard]] double link_rate() {
    settle();
    auto probe = side_.probe(block_bytes());
    const double time = seconds_of([&] {
      for (std::size_t i = 0; i < config_.layer_count; ++i)
        probe.copy(storage().bytes(bs::block_at(i)), i % 2);
      probe.finish();
    });
    return static_cast<double>(all_bytes()) / time;
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
  template <class Work>
  [[nodiscard]] Measured alternate(Streamer& streamer, std::uint64_t fetches, Work&& work) {
    for (int i = 0; i < 2; ++i) (void)seconds_of(work);  // warm: kernels, allocator, residency
    std::vector<double> times, rates;
    Measured result;
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      rates.push_back(link_rate());
      streamer.reset_stats();
      times.push_back(seconds_of(work));
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
    return streamer_->forward(x, c);
  }
  [[nodiscard]] at::Tensor run_resident(const at::Tensor& x, bs::models::DecoderContext& c,
                                        const bs::AdapterTable* table) {
    return bs::resident_forward<Block>(blocks_, resident(), x, c, table, table != nullptr);
  }
  void forget_gradients() {
    for (const at::Tensor& p : adapter().parameters()) p.mutable_grad() = at::Tensor{};
  }
  /// Stands for a head.
  [[nodiscard]] static at::Tensor loss_of(const at::Tensor& output) {
    return output.to(at::kFloat).square().mean();
  }
  /// Forward and backward.
  template <class Forward>
  void step(Forward&& forward) {
    forget_gradients();
    loss_of(forward()).backward();
  }
  void step_resident(const at::Tensor& x, bs::models::DecoderContext& c,
                     const bs::AdapterTable& table, bool recompute) {
    if (!recompute) return step([&] { return run_resident(x, c, &table); });
    forget_gradients();
    checkpointed_step<Block>(blocks_, resident(), x, c, table, loss_of);
  }

  // ---- scenarios

  void page_locked(benchmark::State& state) {
    const bs::TransferShape& shape = evaluating().shape();
    std::uint64_t locked = 0;
    if (shape.chunk_byte_count == 0) {
      for (const auto& region : storage().regions()) locked += region.size();
    } else {
      locked = shape.chunk_byte_count * shape.ticket_count;
    }
    state.SetIterationTime(1e-9);
    const auto weights = static_cast<double>(all_bytes());
    report_.add(
        state, {"page-locked bytes / weight bytes", static_cast<double>(locked) / 1073741824.0,
                "GiB", weights / 1073741824.0, static_cast<double>(locked) / weights, at_most(1.02),
                shape.chunk_byte_count == 0 ? "" : "registration refused: staged"});
  }

  void streamed_forward(benchmark::State& state, std::int64_t tokens) {
    Streamer& s = evaluating();
    const c10::NoGradGuard no_grad;
    const at::Tensor x = input(tokens);
    auto c = context(tokens);
    const Measured m = alternate(s, config_.layer_count, [&] { (void)run_streamed(x, c); });
    count(state, m);
    const double rate = static_cast<double>(m.copied) / m.time_s;
    report_.add(state, {"forward 1x" + std::to_string(tokens) + ", share of memcpy", rate / 1e9,
                        "GB/s", m.link_bytes_per_s / 1e9, rate / m.link_bytes_per_s,
                        bar(at_least(0.95)), std::to_string(m.time_s) + " s"});
  }

  void lora_step(benchmark::State& state, std::size_t cached, double most) {
    Streamer& s = training(cached);
    const at::Tensor x = input(options_.short_tokens);
    auto c = context(options_.short_tokens);
    const std::uint64_t slots = s.shape().slot_count;
    const Measured m = alternate(s, 2 * (config_.layer_count - slots),
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
    const at::Tensor x = input(options_.short_tokens);
    auto c = context(options_.short_tokens);
    bs::AdamW optimizer;
    std::vector<at::Tensor> parameters = adapter().parameters();
    bs::StepContext at_step{.step = 0};
    at_step.learning_rate = 1e-5;
    const Measured m = alternate(s, 2 * (config_.layer_count - s.shape().slot_count), [&] {
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
    const at::Tensor x = input(tokens);
    auto c = context(tokens);
    time_resident(state, "resident forward 1x" + std::to_string(tokens),
                  [&] { (void)run_resident(x, c, nullptr); });
  }
  void resident_step(benchmark::State& state, bool recompute) {
    const at::Tensor x = input(options_.short_tokens);
    auto c = context(options_.short_tokens);
    const bs::AdapterTable table = adapter().table(lora_blocks_);
    time_resident(state,
                  "resident LoRA step 1x" + std::to_string(options_.short_tokens) +
                      (recompute ? ", recomputing" : ""),
                  [&] { step_resident(x, c, table, recompute); });
  }
  template <class Work>
  void time_resident(benchmark::State& state, const std::string& what, Work&& work) {
    for (int i = 0; i < 2; ++i) (void)seconds_of(work);
    std::vector<double> times;
    for (std::size_t i = 0; i < options_.rounds; ++i) times.push_back(seconds_of(work));
    state.SetIterationTime(median(times));
    report_.add(state, {what, median(times) * 1e3, "ms"});
  }

  /// Deterministic kernels from here to the end of the scope. cuBLAS needs a fixed workspace for
  /// them; while the variable that says so is set, LibTorch parses it at every matrix product,
  /// which costs 35 µs each: so never while something is timed.
  class Deterministic {
   public:
    explicit Deterministic(bool strict) : cudnn_{at::globalContext().userEnabledCuDNNSDP()} {
      ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/1);
      at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/!strict);
      if (!strict) at::globalContext().setSDPUseCuDNN(false);
    }
    Deterministic(const Deterministic&) = delete;
    Deterministic& operator=(const Deterministic&) = delete;
    ~Deterministic() {
      at::globalContext().setDeterministicAlgorithms(false, false);
      at::globalContext().setSDPUseCuDNN(cudnn_);
      ::unsetenv("CUBLAS_WORKSPACE_CONFIG");
    }

   private:
    bool cudnn_;
  };

  /// Output, then all gradients, on the host.
  template <class Forward>
  [[nodiscard]] Tensors results_of(Forward&& forward) {
    Tensors results;
    step([&] {
      at::Tensor output = forward();
      results.push_back(output.detach().cpu());
      return output;
    });
    for (const at::Tensor& p : adapter().parameters()) {
      if (!p.grad().defined()) throw std::runtime_error{"a parameter got no gradient"};
      results.push_back(p.grad().cpu());
    }
    settle();
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
    const at::Tensor x = input(options_.short_tokens);
    auto c = context(options_.short_tokens);
    const bs::AdapterTable table = adapter().table(lora_blocks_);
    const Tensors first = results_of([&] { return run_resident(x, c, &table); });
    const Tensors second = results_of([&] { return run_resident(x, c, &table); });
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
    const at::Tensor x = input(tokens);
    auto c = context(tokens);
    (void)evaluating();
    forget_gradients();
    compare_memory(
        state, "device bytes, forward 1x" + std::to_string(tokens),
        [&] { (void)run_resident(x, c, nullptr); }, [&] { (void)run_streamed(x, c); });
  }
  void memory_of_step(benchmark::State& state, bool recompute) {
    const at::Tensor x = input(options_.short_tokens);
    auto c = context(options_.short_tokens);
    const bs::AdapterTable table = adapter().table(lora_blocks_);
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
    settle();
    const double before = static_cast<double>(side_.allocated());
    side_.reset_peak();
    work();
    settle();
    return static_cast<double>(side_.peak()) - before;
  }
  template <class Resident, class Streamed>
  void compare_memory(benchmark::State& state, const std::string& what, Resident&& resident_run,
                      Streamed&& streamed_run) {
    const double resident_peak = peak_of(resident_run);
    const double streamed_peak = peak_of(streamed_run);
    // The weights of the reference are no part of a streamed run.
    const double others = static_cast<double>(side_.allocated()) - static_cast<double>(all_bytes());
    const auto ours = static_cast<double>(side_.backend_bytes());
    const auto slots =
        static_cast<double>(streamer_->shape().slot_count * streamer_->shape().slot_byte_count);
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
  bs::ModelConfig config_;
  std::vector<Block> blocks_;
  std::vector<bs::LoraBlock> lora_blocks_;
  std::optional<bs::RamStorage> storage_;
  std::vector<Tensors> resident_;
  std::optional<bs::LoraAdapter> adapter_;
  std::optional<Streamer> streamer_;  // last: it uses the storage
  std::size_t cached_ = 0;
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
