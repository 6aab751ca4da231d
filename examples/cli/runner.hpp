// SPDX-License-Identifier: Apache-2.0
// The ModelRunner of a backend. Included by one unit per device.
#pragma once

#include "adapter_training.hpp"
#include "backend_runner.hpp"
#include "evaluate_job.hpp"
#include "finetune_job.hpp"
#include "loaded_model.hpp"
#include "run_forecast.hpp"
#include "translated.hpp"

#include <block_streamer/generate/text_generator.hpp>

#include <filesystem>
#include <vector>

namespace block_streamer_cli {

template <block_streamer::execution_backend Backend>
class Runner final : public BackendRunner<ModelRunner, LoadedModel<Backend>, Backend> {
 public:
  using BackendRunner<ModelRunner, LoadedModel<Backend>, Backend>::BackendRunner;

  void load_adapters(const std::vector<std::filesystem::path>& folders) override {
    translated([&] { this->loaded().load_adapters(folders); });
  }
  [[nodiscard]] GenerateReport generate(const GenerateJob& job) override {
    return translated([&] {
      auto& loaded = this->loaded();
      forecast_generation(loaded, job);
      block_streamer::TextGenerator generator{loaded.model(), loaded.streamer().eval(),
                                              job.tokenizer};
      return generator.generate(job.prompts, job.options, job.observer);
    });
  }
  [[nodiscard]] FinetuneReport finetune(const FinetuneJob& job) override {
    return translated([&] { return run_finetune<AdapterTraining<Backend>>(this->loaded(), job); });
  }
  [[nodiscard]] EvaluateReport evaluate(const EvaluateJob& job) override {
    return translated([&] { return run_evaluate(this->loaded(), job); });
  }
};

}  // namespace block_streamer_cli
