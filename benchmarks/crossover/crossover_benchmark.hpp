// SPDX-License-Identifier: Apache-2.0
// The grid, for any device. @see HostSide, CudaSide
#pragma once

#include "../support/random_model.hpp"
#include "../support/report.hpp"
#include "crossover_figures.hpp"
#include "crossover_options.hpp"

#include <block_streamer/block/device_graph.hpp>
#include <block_streamer/block/no_context.hpp>
#include <block_streamer/block/projection.hpp>
#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

/// gelu(x·Upᵀ)·Downᵀ. x: (T,W), bf16.
struct CrossoverBlock {
  using Hidden = at::Tensor;
  using Context = bs::NoContext;
  std::uint64_t width = 0;
  std::uint64_t inner = 0;

  [[nodiscard]] std::vector<bs::WeightSpec> weight_specs() const {
    return {{"up.weight", {inner, width}, true}, {"down.weight", {width, inner}, true}};
  }
  [[nodiscard]] at::Tensor forward(const bs::Weights& weights, const at::Tensor& x,
                                   Context&) const {
    return bs::project(weights, 1, at::gelu(bs::project(weights, 0, x)));
  }
};
static_assert(bs::streamable_block<CrossoverBlock>);

/// @brief Six blocks of inner widths 2W and 3W in turn, random bf16 weights in the RAM tier.
class CrossoverModel {
 public:
  explicit CrossoverModel(std::int64_t width) : storage_{layouts_of(width)} {
    const RandomNumbers numbers;
    for (std::size_t b = 0; b < storage_.block_count(); ++b) {
      const bs::BlockLayout& layout = storage_.image(bs::block_at(b)).layout;
      blocks_.push_back({static_cast<std::uint64_t>(width), layout.tensors[0].spec.shape[0]});
      for (std::size_t i = 0; i < layout.tensors.size(); ++i)
        numbers.fill(storage_.writable_bytes(bs::block_at(b), layout.tensors[i]), b * 64 + i);
    }
  }
  [[nodiscard]] std::vector<CrossoverBlock>& blocks() noexcept { return blocks_; }
  [[nodiscard]] bs::RamStorage& storage() noexcept { return storage_; }
  [[nodiscard]] std::vector<std::vector<at::Tensor>> resident_on(at::Device device) {
    std::vector<std::vector<at::Tensor>> all;
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      all.emplace_back();
      for (const bs::TensorPlacement& tensor : storage_.image(bs::block_at(b)).layout.tensors) {
        const at::Tensor host = bs::view_of(storage_.writable_bytes(bs::block_at(b), tensor),
                                            tensor.spec, at::Device{at::kCPU});
        all.back().push_back(host.to(device, host.scalar_type(), false, /*copy=*/true));
      }
    }
    return all;
  }

 private:
  [[nodiscard]] static std::vector<bs::BlockLayout> layouts_of(std::int64_t width) {
    std::vector<bs::BlockLayout> layouts;
    for (std::uint64_t b = 0; b < 6; ++b) {
      const auto w = static_cast<std::uint64_t>(width);
      const std::uint64_t inner = (2 + b % 2) * w;
      bs::BlockLayout& layout = layouts.emplace_back();
      std::uint64_t end = 0;
      for (const auto& spec : CrossoverBlock{w, inner}.weight_specs()) {
        const std::uint64_t begin = bs::round_up(end, bs::tensor_alignment);
        const std::uint64_t bytes = bs::dense_byte_count(bs::DType::bf16, spec.shape).value();
        layout.tensors.push_back({{spec.name, bs::DType::bf16, spec.shape}, 0, begin, bytes});
        end = begin + bytes;
      }
      layout.slot_byte_count = {end};
    }
    return layouts;
  }

  bs::RamStorage storage_;
  std::vector<CrossoverBlock> blocks_;
};

/// @brief Everything that runs in one cell: six modes of the same pass, over the same bytes.
template <class Side>
class CrossoverRun {
 public:
  using Backend = typename Side::Backend;
  using Graph = bs::DeviceGraph<Backend>;
  using Streamer = bs::Streamer<CrossoverBlock, BorrowedRam, bs::ExternalOptimizer, Backend>;

  CrossoverRun(Side& side, CrossoverModel& model, std::uint32_t ahead, std::int64_t width,
               std::int64_t tokens)
      : side_{side},
        model_{model},
        backend_{side.backend()},
        bridge_{backend_},
        streamer_{model.blocks(), BorrowedRam{model.storage()}, backend_, options(ahead)},
        place_bytes_{streamer_.shape().slot_byte_count},
        places_{backend_.allocate_device(2 * place_bytes_)} {
    input_ = at::randn({tokens, width}, at::detail::createCPUGenerator(1),
                       at::TensorOptions{}.dtype(at::kFloat))
                 .to(side.device(), at::kBFloat16);  // (T,W)
    cell_.width = width;
    cell_.tokens = tokens;
    cell_.graphs = Graph::supported;
    for (std::size_t b = 0; b < model.blocks().size(); ++b)
      cell_.block_bytes.push_back(model.storage().image(bs::block_at(b)).layout.slot_byte_count[0]);
  }

  [[nodiscard]] CrossoverCell measure(const CrossoverOptions& options) {
    const c10::NoGradGuard no_grad;
    resident_ = model_.resident_on(side_.device());
    check_outputs();
    std::array<std::vector<double>, crossover_mode_names.size()> times;
    for (std::size_t run = 0; run < options.warmup + options.runs; ++run) {
      for (std::size_t m = 0; m < times.size(); ++m) {
        const auto mode = static_cast<CrossoverMode>(m);
        if (needs_graph(mode) && !cell_.graphs) continue;
        const double time = seconds_of(mode);
        if (run >= options.warmup) times[m].push_back(time);
      }
    }
    for (std::size_t m = 0; m < times.size(); ++m) {
      if (!times[m].empty()) cell_.times[m] = CrossoverTimes{times[m]};
    }
    measure_memory();
    std::vector<bs::ReadPlan> copies;
    for (std::size_t b = 0; b < cell_.block_bytes.size(); ++b)
      copies.push_back(bs::plan_memory_copies(model_.storage().image(bs::block_at(b)), 0));
    const std::uint32_t slots = streamer_.shape().slot_count;
    cell_.recurrence_s =
        recurrence_of(cell_, CrossoverMode::resident_eager, CrossoverMode::transfer, copies, slots);
    if (cell_.graphs) {
      cell_.graph_recurrence_s = recurrence_of(cell_, CrossoverMode::resident_captured,
                                               CrossoverMode::transfer_captured, copies, slots);
    }
    return cell_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  /// Each pass stands alone: it fetches what it needs and nothing for the next.
  [[nodiscard]] static bs::StreamerOptions options(std::uint32_t ahead) {
    bs::StreamerOptions options;
    options.prefetch_ahead = ahead;
    options.prefetch_next_pass = false;
    return options;
  }

  [[nodiscard]] at::Tensor resident_pass() {
    bs::NoContext context;
    return bs::resident_forward<CrossoverBlock>(model_.blocks(), resident_, input_, context);
  }
  void transfer(typename Backend::Stream& stream) {
    for (std::size_t b = 0; b < cell_.block_bytes.size(); ++b) {
      const auto from = model_.storage().bytes(bs::block_at(b)).first(cell_.block_bytes[b]);
      backend_.copy_async(backend_.bytes(places_).subspan(b % 2 * place_bytes_, from.size()), from,
                          bs::CopyDirection::host_to_device, stream);
    }
  }
  void enqueue(CrossoverMode mode) {
    switch (mode) {
      case CrossoverMode::resident_eager:
        output_ = resident_pass();
        return;
      case CrossoverMode::resident_captured:
        return resident_graph_.replay();
      case CrossoverMode::transfer:
        return transfer(bridge_.current());
      case CrossoverMode::transfer_captured:
        return transfer_graph_.replay();
      case CrossoverMode::streamed_eager:
        output_ = streamer_.forward(input_);
        return;
      case CrossoverMode::streamed_graph:
        return streamed_graph_->replay();
    }
  }
  /// The host's copies end where a queue of the backend says so.
  void finish(CrossoverMode mode) {
    if (!Side::is_device && mode == CrossoverMode::transfer) {
      auto event = backend_.make_event();
      backend_.record(event, bridge_.current());
      backend_.synchronize(event);
    }
    side_.synchronize();
  }
  [[nodiscard]] double seconds_of(CrossoverMode mode) {
    output_ = at::Tensor{};
    finish(mode);
    const auto begin = Clock::now();
    enqueue(mode);
    finish(mode);
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void record_graphs() {
    side_stream_.emplace(backend_, side_.device());
    side_stream_->run([this] {
      output_ = resident_pass();
      side_.synchronize();
      resident_graph_.record([this] { resident_output_ = resident_pass(); });
      transfer_graph_.record([this] { transfer(bridge_.current()); });
    });
    captured_.emplace(streamer_.capture());
    streamed_graph_ = &captured_->pass(input_);
    streamed_graph_->load(input_);
  }
  void check_outputs() {
    const at::Tensor expected = resident_pass().clone();
    const auto check = [&](const at::Tensor& output, const char* what) {
      if (!at::equal(output, expected))
        throw std::runtime_error{std::string{what} + " gives other bits than the resident pass"};
    };
    check(streamer_.forward(input_), "the streamed pass");
    if constexpr (Graph::supported) {
      record_graphs();
      resident_graph_.replay();
      check(resident_output_, "the captured resident pass");
      streamed_graph_->replay();
      check(streamed_graph_->output(), "the captured streamed pass");
    }
  }

  /// LibTorch's peak of one pass beyond what lay there before, and what a mode holds besides.
  void measure_memory() {
    if (!Side::is_device) return;
    const auto weights = static_cast<std::uint64_t>(cell_.total_bytes());
    const std::uint64_t slots = streamer_.shape().slot_count * place_bytes_;
    const auto peak_of = [&](CrossoverMode mode) {
      output_ = at::Tensor{};
      side_.synchronize();
      const std::uint64_t before = side_.allocated();
      side_.reset_peak();
      enqueue(mode);
      side_.synchronize();
      return side_.peak() - before;
    };
    const auto set = [&](CrossoverMode mode, std::uint64_t bytes) {
      cell_.peak_bytes[static_cast<std::size_t>(mode)] = bytes;
    };
    const std::uint64_t input = input_.nbytes();
    cell_.increment_bytes = peak_of(CrossoverMode::resident_eager);
    set(CrossoverMode::resident_eager, weights + input + cell_.increment_bytes);
    set(CrossoverMode::transfer, 2 * place_bytes_);
    set(CrossoverMode::streamed_eager, slots + input + peak_of(CrossoverMode::streamed_eager));
  }

  Side& side_;
  CrossoverModel& model_;
  Backend backend_;
  bs::StreamBridge<Backend> bridge_;
  Streamer streamer_;  // page-locks the storage, from which all modes copy
  std::uint64_t place_bytes_;
  typename Backend::DeviceBuffer places_;
  std::vector<std::vector<at::Tensor>> resident_;
  at::Tensor input_, output_, resident_output_;
  std::optional<typename Graph::Side> side_stream_;
  Graph resident_graph_, transfer_graph_;
  std::optional<bs::CapturedForward<CrossoverBlock, Backend>> captured_;
  bs::CapturedPass<CrossoverBlock, Backend>* streamed_graph_ = nullptr;  ///< one of captured_
  CrossoverCell cell_;
};

/// @brief Registers a benchmark for each mode of each cell; a cell is measured, all modes in turn,
/// when the first of them runs.
template <class Side>
class CrossoverBenchmark {
 public:
  CrossoverBenchmark(Side& side, const CrossoverOptions& options, Report& report)
      : side_{side}, options_{options}, report_{report} {}

  void register_all() {
    for (const std::int64_t width : options_.widths) {
      for (const std::int64_t tokens : options_.tokens) {
        for (std::size_t m = 0; m < crossover_mode_names.size(); ++m) {
          const std::string name = std::string{"crossover/"} + crossover_mode_names[m] +
                                   "/width:" + std::to_string(width) +
                                   "/tokens:" + std::to_string(tokens);
          register_once(report_, name, [=, this](benchmark::State& state) {
            show(state, static_cast<CrossoverMode>(m), width, tokens);
          });
        }
      }
    }
  }
  void print_sentences() const {
    for (const std::int64_t tokens : options_.tokens) {
      std::vector<CrossoverCell> row;
      for (const std::int64_t width : options_.widths) {
        const auto found = cells_.find({width, tokens});
        if (found != cells_.end()) row.push_back(found->second);
      }
      if (!row.empty()) std::printf("%s\n", crossover_sentence(row).c_str());
    }
  }

 private:
  static constexpr double mib = 1048576;

  [[nodiscard]] const CrossoverCell& cell(std::int64_t width, std::int64_t tokens) {
    const auto known = cells_.find({width, tokens});
    if (known != cells_.end()) return known->second;
    if (!model_ || model_width_ != width) {
      model_.emplace(width);
      model_width_ = width;
    }
    CrossoverRun<Side> run{side_, *model_, options_.prefetch_ahead, width, tokens};
    const CrossoverCell& measured =
        cells_.emplace(std::pair{width, tokens}, run.measure(options_)).first->second;
    report(measured);
    return measured;
  }

  void show(benchmark::State& state, CrossoverMode mode, std::int64_t width, std::int64_t tokens) {
    if (needs_graph(mode) && !bs::DeviceGraph<typename Side::Backend>::supported) {
      state.SkipWithError("skipped: this device has no graphs");
      return;
    }
    const CrossoverCell& measured = cell(width, tokens);
    const CrossoverTimes& times = measured.times[static_cast<std::size_t>(mode)];
    state.SetIterationTime(times.median_s);
    state.counters["median_ms"] = times.median_s * 1e3;
    state.counters["mean_ms"] = times.mean_s * 1e3;
    state.counters["variance_ms2"] = times.variance_s2 * 1e6;
    state.counters["least_ms"] = times.least_s * 1e3;
    state.counters["most_ms"] = times.most_s * 1e3;
    if (Side::is_device) {
      if (!needs_graph(mode)) {
        state.counters["peak_bytes"] =
            static_cast<double>(measured.peak_bytes[static_cast<std::size_t>(mode)]);
      }
      state.counters["increment_bytes"] = static_cast<double>(measured.increment_bytes);
    }
    if (mode == CrossoverMode::streamed_eager) {
      state.counters["overlap"] = measured.eager_overlap();
      state.counters["recurrence_ms"] = measured.recurrence_s * 1e3;
    }
    if (mode == CrossoverMode::streamed_graph) state.counters["overlap"] = measured.graph_overlap();
    state.SetLabel(measured.regime());
  }

  void report(const CrossoverCell& cell) {
    const std::string name =
        "width " + std::to_string(cell.width) + ", " + std::to_string(cell.tokens) + " tokens";
    const auto ms = [&](CrossoverMode mode) { return cell.median_s(mode) * 1e3; };
    char note[240];
    const int length = std::snprintf(
        note, sizeof note, "%s; resident %.3f, transfer %.3f, recurrence %.3f ms; overlap %.3f",
        cell.regime().c_str(), ms(CrossoverMode::resident_eager), ms(CrossoverMode::transfer),
        cell.recurrence_s * 1e3, cell.eager_overlap());
    if (Side::is_device) {
      std::snprintf(note + length, sizeof note - static_cast<std::size_t>(length),
                    "; peak %.1f -> %.1f MiB, increment %.1f MiB",
                    static_cast<double>(peak(cell, CrossoverMode::resident_eager)) / mib,
                    static_cast<double>(peak(cell, CrossoverMode::streamed_eager)) / mib,
                    static_cast<double>(cell.increment_bytes) / mib);
    }
    const double visits = static_cast<double>(cell.block_bytes.size());
    add_row(name + ", eager", ms(CrossoverMode::streamed_eager),
            1.03 * cell.recurrence_s * 1e3 + 0.01 * visits, note);
    if (cell.graphs) report_graph(cell, name);
  }
  void report_graph(const CrossoverCell& cell, const std::string& name) {
    const auto ms = [&](CrossoverMode mode) { return cell.median_s(mode) * 1e3; };
    const double slower =
        std::max(ms(CrossoverMode::resident_captured), ms(CrossoverMode::transfer_captured));
    char note[160];
    std::snprintf(note, sizeof note,
                  "captured: resident %.3f, transfer %.3f, recurrence %.3f ms; overlap %.3f",
                  ms(CrossoverMode::resident_captured), ms(CrossoverMode::transfer_captured),
                  cell.graph_recurrence_s * 1e3, cell.graph_overlap());
    add_row(name + ", graph", ms(CrossoverMode::streamed_graph),
            1.10 * slower + cell.one_copy_s(CrossoverMode::transfer_captured) * 1e3, note);
    if (!cell.launch_bound()) return;
    const double half = 0.5 * ms(CrossoverMode::resident_eager);
    add_row(name + ", graph / half of resident eager", ms(CrossoverMode::streamed_graph), half,
            ms(CrossoverMode::transfer_captured) > half ? "the copies alone take longer" : "");
  }
  void add_row(const std::string& what, double achieved, double limit, const std::string& note) {
    report_.add({what, achieved, "ms", limit, achieved / limit,
                 Side::is_device ? std::optional{at_most(1)} : std::nullopt, note});
  }
  [[nodiscard]] static std::uint64_t peak(const CrossoverCell& cell, CrossoverMode mode) {
    return cell.peak_bytes[static_cast<std::size_t>(mode)];
  }

  Side& side_;
  CrossoverOptions options_;
  Report& report_;
  std::optional<CrossoverModel> model_;
  std::int64_t model_width_ = 0;
  std::map<std::pair<std::int64_t, std::int64_t>, CrossoverCell> cells_;
};

/// @brief Runs what the command line selects, and says where the crossover lies.
template <class Side>
void run_crossover(Side& side, const CrossoverOptions& options, Report& report) {
  CrossoverBenchmark<Side> grid{side, options, report};
  grid.register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::ClearRegisteredBenchmarks();
  grid.print_sentences();
}

}  // namespace block_streamer_benchmarks
