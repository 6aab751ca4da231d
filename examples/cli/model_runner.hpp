// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common_options.hpp"
#include "jobs.hpp"
#include "memory_report.hpp"
#include "vocabulary_report.hpp"

#include <block_streamer/trace/statistics.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace block_streamer_cli {

/// @brief A model on one device that can be trained, behind virtual calls: commands see no
/// LibTorch. One implementation per device and mode, runner.hpp and full_runner.hpp.
/// **Errors.** Those of the library; LibTorch's own are translated, out of memory in words.
class TrainingRunner {
 public:
  TrainingRunner() = default;
  TrainingRunner(const TrainingRunner&) = delete;
  TrainingRunner& operator=(const TrainingRunner&) = delete;
  virtual ~TrainingRunner() = default;

  [[nodiscard]] virtual FinetuneReport finetune(const FinetuneJob& job) = 0;

  /// @brief What streaming has cost so far, a streamed head included.
  [[nodiscard]] virtual block_streamer::Statistics statistics() const = 0;
  [[nodiscard]] virtual VocabularyReport vocabulary() const = 0;
  /// @brief The peaks of memory so far, and what was predicted for the jobs so far.
  [[nodiscard]] virtual MemoryReport memory() const = 0;
  /// @brief Writes the timeline, if --trace asked for one.
  virtual void write_trace() = 0;
};

/// @brief A model whose weights stay as they are: it generates, is evaluated, and an adapter of it
/// trains.
class ModelRunner : public TrainingRunner {
 public:
  /// @brief Loads PEFT adapters, at least one, and weaves in what they add together. A single one
  /// stays the one that finetune() goes on with.
  virtual void load_adapters(const std::vector<std::filesystem::path>& folders) = 0;

  [[nodiscard]] virtual GenerateReport generate(const GenerateJob& job) = 0;
  [[nodiscard]] virtual EvaluateReport evaluate(const EvaluateJob& job) = 0;
};

/// @brief Loads the model that the options name and says on standard error where and how it runs.
[[nodiscard]] std::unique_ptr<ModelRunner> open_runner(const CommonOptions& options);
/// @brief The same for a model of which everything trains; says what memory that needs.
/// @throws Error if there is not so much.
[[nodiscard]] std::unique_ptr<TrainingRunner> open_full_runner(const CommonOptions& options,
                                                               const FinetuneOptions& finetune);

// Each in a unit of its own; the program is linked with the CUDA one or with its stand-in.
[[nodiscard]] std::unique_ptr<ModelRunner> open_cpu_runner(const CommonOptions& options);
[[nodiscard]] std::unique_ptr<ModelRunner> open_cuda_runner(const CommonOptions& options,
                                                            int device);
[[nodiscard]] std::unique_ptr<TrainingRunner> open_cpu_full_runner(const CommonOptions& options,
                                                                   const FinetuneOptions& finetune);
[[nodiscard]] std::unique_ptr<TrainingRunner> open_cuda_full_runner(const CommonOptions& options,
                                                                    const FinetuneOptions& finetune,
                                                                    int device);
/// @brief Why no CUDA device can be used; nullopt: one can.
[[nodiscard]] std::optional<std::string> why_cuda_is_off();

}  // namespace block_streamer_cli
