// SPDX-License-Identifier: Apache-2.0
// What the runners of a backend have in common, whatever they have loaded: timeline, figures,
// memory.
#pragma once

#include "console.hpp"
#include "expected_memory.hpp"
#include "measured_memory.hpp"
#include "model_runner.hpp"

#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/os/atomic_replace.hpp>
#include <block_streamer/trace/lane_overlap.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <sstream>
#include <string>
#include <utility>

namespace block_streamer_cli {

/// @brief Says how much of copying and computing went on at once. Nothing where nothing was copied.
/// @param dropped  intervals that did not fit: what is said is about those before.
inline void say_overlap(std::span<const block_streamer::TraceEvent> events, std::uint64_t dropped) {
  using block_streamer::Lane;
  const auto overlap = block_streamer::overlap_of(events, Lane::copy_in, Lane::compute);
  if (overlap.first == block_streamer::Nanoseconds::zero()) return;
  const auto seconds = [](block_streamer::Nanoseconds time) {
    return readable_number(std::chrono::duration<double>(time).count(), 3) + " s";
  };
  if (dropped > 0)
    say("timeline: it is full, and has the first " + std::to_string(events.size()) +
        " intervals; " + std::to_string(dropped) + " later ones are left out");
  say("timeline: copying in " + seconds(overlap.first) + ", computing " + seconds(overlap.second) +
      ", both at once " + seconds(overlap.both) + " (" +
      readable_number(100 * overlap.hidden(), 1) + " % of the shorter)");
}

/// @tparam Interface  TrainingRunner or what refines it. @tparam Loaded  LoadedModel or FullModel.
template <class Interface, class Loaded, block_streamer::execution_backend Backend>
class BackendRunner : public Interface {
 public:
  /// @param torch_peak  the most device memory that LibTorch has had; empty: it is the host's.
  /// @param more  what Loaded takes between the common options and the trace.
  template <class... More>
  BackendRunner(Backend backend, at::Device device, const CommonOptions& common,
                std::function<std::uint64_t()> torch_peak, const More&... more)
      : trace_path_{common.trace},
        writer_{trace_path_.empty() ? 0 : trace_capacity},
        backend_{backend},
        torch_peak_{std::move(torch_peak)},
        loaded_{std::move(backend), device, common, more...,
                trace_path_.empty() ? block_streamer::TraceSinkRef{}
                                    : block_streamer::TraceSinkRef{writer_}} {}

  [[nodiscard]] block_streamer::Statistics statistics() const override {
    return loaded_.statistics();
  }
  [[nodiscard]] VocabularyReport vocabulary() const override { return loaded_.vocabulary(); }
  [[nodiscard]] MemoryReport memory() const override {
    MemoryReport report = measured_memory(backend_, torch_peak_);
    loaded_.memory().add_to(report, backend_.host_addressable());
    return report;
  }
  void write_trace() override {
    if (trace_path_.empty()) return;
    loaded_.streamer().drain();
    std::ostringstream text;
    writer_.write_to(text);
    block_streamer::atomic_replace(trace_path_, text.view());
    say_overlap(writer_.events(), writer_.dropped());
  }

 protected:
  [[nodiscard]] Loaded& loaded() noexcept { return loaded_; }

 private:
  static constexpr std::size_t trace_capacity = std::size_t{1} << 18;

  std::filesystem::path trace_path_;
  block_streamer::PerfettoWriter writer_;  // before what records into it
  Backend backend_;
  std::function<std::uint64_t()> torch_peak_;
  Loaded loaded_;
};

}  // namespace block_streamer_cli
