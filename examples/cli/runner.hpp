// SPDX-License-Identifier: Apache-2.0
// The ModelRunner of a backend. Included by one unit per device.
#pragma once

#include "adapter_training.hpp"
#include "evaluate_job.hpp"
#include "finetune_job.hpp"
#include "loaded_model.hpp"
#include "measured_memory.hpp"
#include "model_runner.hpp"
#include "run_forecast.hpp"
#include "translated.hpp"

#include <block_streamer/generate/text_generator.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

template <block_streamer::execution_backend Backend>
class Runner final : public ModelRunner {
 public:
  /// @param torch_peak  the most device memory that LibTorch has had; empty: it is the host's.
  Runner(Backend backend, at::Device device, const CommonOptions& options,
         std::function<std::uint64_t()> torch_peak = {})
      : trace_path_{options.trace},
        writer_{trace_path_.empty() ? 0 : trace_capacity},
        backend_{backend},
        torch_peak_{std::move(torch_peak)},
        loaded_{std::move(backend), device, options,
                trace_path_.empty() ? block_streamer::TraceSinkRef{}
                                    : block_streamer::TraceSinkRef{writer_}} {}

  void load_adapters(const std::vector<std::filesystem::path>& folders) override {
    translated([&] { loaded_.load_adapters(folders); });
  }
  [[nodiscard]] GenerateReport generate(const GenerateJob& job) override {
    return translated([&] {
      forecast_generation(loaded_, job);
      block_streamer::TextGenerator generator{loaded_.model(), loaded_.streamer().eval(),
                                              job.tokenizer};
      return generator.generate(job.prompts, job.options, job.observer);
    });
  }
  [[nodiscard]] FinetuneReport finetune(const FinetuneJob& job) override {
    return translated([&] { return run_finetune<AdapterTraining<Backend>>(loaded_, job); });
  }
  [[nodiscard]] EvaluateReport evaluate(const EvaluateJob& job) override {
    return translated([&] { return run_evaluate(loaded_, job); });
  }
  [[nodiscard]] block_streamer::Statistics statistics() const override {
    return loaded_.statistics();
  }
  [[nodiscard]] VocabularyReport vocabulary() const override { return loaded_.vocabulary(); }
  [[nodiscard]] MemoryReport memory() const override {
    MemoryReport report = measured_memory(backend_, torch_peak_);
    const auto& forecast = loaded_.forecast();
    if (!forecast) return report;
    if (forecast->program > 0) report.rss.predicted = forecast->host(backend_.host_addressable());
    if (report.device) report.device->predicted = forecast->device();
    if (report.page_locked) report.page_locked->predicted = forecast->page_locked();
    return report;
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
  LoadedModel<Backend> loaded_;
};

}  // namespace block_streamer_cli
