// SPDX-License-Identifier: Apache-2.0
// The TrainingRunner of a backend for all of a model's parameters. Included by one unit per device.
#pragma once

#include "finetune_job.hpp"
#include "full_model.hpp"
#include "full_training.hpp"
#include "measured_memory.hpp"
#include "model_runner.hpp"
#include "translated.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <utility>

namespace block_streamer_cli {

template <block_streamer::execution_backend Backend>
class FullRunner final : public TrainingRunner {
 public:
  /// @param torch_peak  @see measured_memory
  FullRunner(Backend backend, at::Device device, const CommonOptions& common,
             const FinetuneOptions& finetune, std::function<std::uint64_t()> torch_peak = {})
      : trace_path_{common.trace},
        writer_{trace_path_.empty() ? 0 : trace_capacity},
        backend_{backend},
        torch_peak_{std::move(torch_peak)},
        loaded_{std::move(backend), device, common, finetune,
                trace_path_.empty() ? block_streamer::TraceSinkRef{}
                                    : block_streamer::TraceSinkRef{writer_}} {}

  [[nodiscard]] FinetuneReport finetune(const FinetuneJob& job) override {
    return translated([&] { return run_finetune<FullTraining<Backend>>(loaded_, job); });
  }
  [[nodiscard]] block_streamer::Statistics statistics() const override {
    return loaded_.statistics();
  }
  [[nodiscard]] VocabularyReport vocabulary() const override { return {}; }
  [[nodiscard]] MemoryReport memory() const override {
    return measured_memory(backend_, torch_peak_);
  }
  void write_trace() override {
    if (trace_path_.empty()) return;
    loaded_.streamer().drain();
    writer_.write_to(trace_path_);
  }

 private:
  static constexpr std::size_t trace_capacity = std::size_t{1} << 18;

  std::filesystem::path trace_path_;
  block_streamer::PerfettoWriter writer_;  // before what records into it
  Backend backend_;
  std::function<std::uint64_t()> torch_peak_;
  FullModel<Backend> loaded_;
};

}  // namespace block_streamer_cli
