// SPDX-License-Identifier: Apache-2.0
// A model of which everything trains, on one device.
#pragma once

#include "common_options.hpp"
#include "compute_type.hpp"
#include "console.hpp"
#include "expected_memory.hpp"
#include "full_memory.hpp"
#include "jobs.hpp"
#include "resident_choice.hpp"
#include "storage_choice.hpp"
#include "verified_reads.hpp"
#include "vocabulary_report.hpp"

#include <block_streamer/architecture/model_summary.hpp>
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/finetune/trained_model_files.hpp>
#include <block_streamer/models/decoder_masters.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/resident_parameters.hpp>
#include <block_streamer/optim/external_optimizer.hpp>
#include <block_streamer/os/process_memory.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>

#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// The blocks' weights are fp32 masters in host memory, from which they are streamed; embedding,
/// norm and head stay on the device, their masters too.
/// **Threads.** One at a time.
template <block_streamer::execution_backend Backend>
class FullModel {
 public:
  using Streamer =
      block_streamer::Streamer<block_streamer::models::DecoderBlock, block_streamer::MasterStorage,
                               block_streamer::ExternalOptimizer, Backend>;

  /// @param trace  outlives it.
  /// @throws Error if it does not fit into memory; nothing large was read then.
  FullModel(Backend backend, at::Device device, const CommonOptions& common,
            const FinetuneOptions& options, block_streamer::TraceSinkRef trace)
      : FullModel{backend,
                  device,
                  common,
                  trace,
                  block_streamer::resident_memory().value_or(0),
                  checked_type(backend, device, common, options)} {}

  [[nodiscard]] const block_streamer::models::DecoderModel& model() const noexcept {
    return model_;
  }
  [[nodiscard]] Streamer& streamer() noexcept { return streamer_; }
  [[nodiscard]] const Streamer& streamer() const noexcept { return streamer_; }
  [[nodiscard]] block_streamer::Statistics statistics() const { return streamer_.statistics(); }
  [[nodiscard]] VocabularyReport vocabulary() const { return {}; }
  [[nodiscard]] ExpectedMemory& memory() noexcept { return memory_; }
  [[nodiscard]] const ExpectedMemory& memory() const noexcept { return memory_; }
  [[nodiscard]] static constexpr std::uint64_t adapter_parameters() noexcept { return 0; }
  /// @brief Parameters of the largest block.
  [[nodiscard]] std::uint64_t largest_block() const {
    std::uint64_t largest = 0;
    for (const auto& block : masters_) largest = std::max(largest, count_of(block));
    return largest;
  }
  [[nodiscard]] block_streamer::models::ResidentParameters& residents() noexcept {
    return residents_;
  }
  /// @brief All that trains, under its names in the checkpoint: embedding, blocks, norm, head.
  [[nodiscard]] const block_streamer::NamedTensors& parameters() const noexcept {
    return parameters_;
  }
  [[nodiscard]] const block_streamer::TrainedModelFiles& files() const noexcept { return files_; }

 private:
  FullModel(Backend backend, at::Device device, const CommonOptions& common,
            block_streamer::TraceSinkRef trace, std::uint64_t program, block_streamer::DType type)
      : model_{block_streamer::Checkpoint::open(common.model), {.dtype = type, .device = device}},
        masters_{block_streamer::models::load_block_masters(model_)},
        streamer_{model_.blocks(), block_streamer::MasterStorage{masters_}, std::move(backend),
                  streamer_options(common, type, trace)},
        residents_{model_},
        parameters_{residents_.around(block_streamer::models::with_full_names(model_, masters_))},
        files_{model_.checkpoint(), stored_parameters()} {
    if (common.verify_reads) verify_files(model_);
    expect_finite();
    forecast_standing(common, program, device.is_cpu());
    say_what_stays_on_the_device(common.device_budget, streamer_.shape(), streamer_.block_count());
    for (const std::string& warning : model_.checkpoint().warnings()) say("warning: " + warning);
    for (const std::string& warning : model_.warnings()) say("warning: " + warning);
  }

  static block_streamer::DType checked_type(const Backend& backend, at::Device device,
                                            const CommonOptions& common,
                                            const FinetuneOptions& options) {
    const auto checkpoint = block_streamer::Checkpoint::open(common.model);
    std::vector<std::string> ignored;  // the model reads it again and keeps them
    const auto config = block_streamer::read_model_config(checkpoint.folder(), ignored);
    const auto layout = block_streamer::describe_model(config, checkpoint);
    const auto type = choose_compute_type(common.dtype, config, checkpoint, device);
    const bool on_host = device.is_cpu();
    const FullMemory memory = full_memory(
        common, options, config, block_streamer::summarize(layout, checkpoint), type, on_host);
    expect_full_memory(memory, on_host, free_device_memory(backend));
    expect_budget_holds_a_block(
        common.device_budget, "ram",
        block_streamer::make_block_map(checkpoint, layout.blocks, /*read_granularity=*/1),
        block_streamer::DType::f32);
    return type;
  }
  static block_streamer::StreamerOptions streamer_options(const CommonOptions& common,
                                                          block_streamer::DType type,
                                                          block_streamer::TraceSinkRef trace) {
    block_streamer::StreamerOptions result;
    result.prefetch_ahead = common.prefetch_ahead;
    result.device_budget = common.device_budget;
    result.trace = trace;
    result.dtype = type;
    result.activations = common.activations;
    return result;
  }
  static std::uint64_t count_of(const block_streamer::NamedTensors& tensors) {
    std::uint64_t count = 0;
    for (const auto& [name, tensor] : tensors) count += static_cast<std::uint64_t>(tensor.numel());
    return count;
  }
  /// Each parameter in fp32 has a gradient and two moments: a block's beside it on the host, whose
  /// gradients come there through two places; those of embedding, norm and head on the device.
  void forecast_standing(const CommonOptions& common, std::uint64_t program, bool device_is_host) {
    constexpr std::uint64_t fp32 = 4;
    std::uint64_t of_blocks = 0;
    for (const auto& block : masters_) of_blocks += count_of(block);
    const std::uint64_t residents = count_of(parameters_) - of_blocks;
    const std::uint64_t item = block_streamer::byte_count_of(model_.dtype());
    block_streamer::MemoryForecast& standing = memory_.standing;
    standing.program = program;
    standing.blocks = 4 * fp32 * of_blocks;
    standing.resident = residents * item;
    standing.trained = residents * (4 * fp32 - (item == fp32 ? fp32 : 0));
    add_pipeline(standing, streamer_.shape());
    memory_.offloads_inputs = leave_the_device(common.activations, device_is_host);
    if (device_is_host) return;
    standing.slots += 2 * fp32 * largest_block();
    standing.locked_blocks = 2 * fp32 * of_blocks;  // weights and gradients
    standing.staging +=
        2 * fp32 * largest_block();  // for gradients that have no place of their own
  }
  /// What is not finite would spoil every step, and could not be saved.
  void expect_finite() const {
    for (const auto& [name, tensor] : parameters_) {
      if (at::isfinite(tensor).all().template item<bool>()) continue;
      throw block_streamer::Error{model_.checkpoint().folder().string() + ": tensor " + name +
                                  " has a value that is not finite: nothing can be trained from "
                                  "it; 'block-streamer inspect --verify' shows where"};
    }
  }
  /// A head that is stored beside the embedding that it is tied to stays equal to it.
  [[nodiscard]] block_streamer::NamedTensors stored_parameters() const {
    block_streamer::NamedTensors all = parameters_;
    const auto* const head = model_.checkpoint().find(block_streamer::head_name);
    const at::Tensor& embedding = all.front().tensor;
    if (model_.layout().tied && head != nullptr &&
        head->spec.shape == block_streamer::shape_of(embedding)) {
      all.push_back({head->spec.name, embedding});
    }
    return all;
  }

  block_streamer::models::DecoderModel model_;
  std::vector<block_streamer::NamedTensors> masters_;
  Streamer streamer_;
  block_streamer::models::ResidentParameters residents_;
  block_streamer::NamedTensors parameters_;
  block_streamer::TrainedModelFiles files_;
  ExpectedMemory memory_;
};

}  // namespace block_streamer_cli
