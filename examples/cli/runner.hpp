// SPDX-License-Identifier: Apache-2.0
// The ModelRunner of a backend. Included by one unit per device.
#pragma once

#include "adapter_training.hpp"
#include "evaluate_job.hpp"
#include "finetune_job.hpp"
#include "loaded_model.hpp"
#include "model_runner.hpp"
#include "translated.hpp"

#include <block_streamer/generate/text_generator.hpp>

#include <optional>
#include <string>
#include <utility>

namespace block_streamer_cli {

template <block_streamer::execution_backend Backend>
class Runner final : public ModelRunner {
 public:
  Runner(Backend backend, at::Device device, const CommonOptions& options)
      : trace_path_{options.trace},
        writer_{trace_path_.empty() ? 0 : trace_capacity},
        loaded_{std::move(backend), device, options,
                trace_path_.empty() ? block_streamer::TraceSinkRef{}
                                    : block_streamer::TraceSinkRef{writer_}} {}

  void load_adapter(const std::filesystem::path& folder) override {
    translated([&] { loaded_.load_adapter(folder); });
  }
  [[nodiscard]] GenerateReport generate(const GenerateJob& job) override {
    return translated([&] {
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
  void write_trace() override {
    if (trace_path_.empty()) return;
    loaded_.streamer().drain();
    writer_.write_to(trace_path_);
  }

 private:
  static constexpr std::size_t trace_capacity = std::size_t{1} << 18;

  std::filesystem::path trace_path_;
  block_streamer::PerfettoWriter writer_;  // before what records into it
  LoadedModel<Backend> loaded_;
};

}  // namespace block_streamer_cli
