// SPDX-License-Identifier: Apache-2.0
// A model, its blocks' streamer and its adapter on one device: what every job of a runner works on.
#pragma once

#include "common_options.hpp"
#include "compute_type.hpp"
#include "console.hpp"
#include "expected_memory.hpp"
#include "fitting_adapter.hpp"
#include "resident_choice.hpp"
#include "storage_choice.hpp"
#include "verified_reads.hpp"
#include "vocabulary.hpp"
#include "vocabulary_report.hpp"

#include <block_streamer/architecture/model_summary.hpp>
#include <block_streamer/lora/adapter_set.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/stream_head.hpp>
#include <block_streamer/optim/external_optimizer.hpp>
#include <block_streamer/os/process_memory.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// **Threads.** One at a time.
template <block_streamer::execution_backend Backend>
class LoadedModel {
 public:
  using Streamer =
      block_streamer::Streamer<block_streamer::models::DecoderBlock, block_streamer::AnyStorage,
                               block_streamer::ExternalOptimizer, Backend>;

  /// @param trace  outlives it.
  LoadedModel(Backend backend, at::Device device, const CommonOptions& options,
              block_streamer::TraceSinkRef trace)
      : LoadedModel{backend, device, options, trace,
                    Plan{block_streamer::Checkpoint::open(options.model), device, options,
                         free_device_memory(backend)}} {}

  [[nodiscard]] const block_streamer::models::DecoderModel& model() const noexcept {
    return model_;
  }
  [[nodiscard]] Streamer& streamer() noexcept { return streamer_; }
  [[nodiscard]] const Streamer& streamer() const noexcept { return streamer_; }

  /// @brief What streaming has cost so far: blocks and, if it is streamed, the head.
  [[nodiscard]] block_streamer::Statistics statistics() const {
    return with_head(streamer_.statistics(), model_.head_statistics());
  }
  [[nodiscard]] VocabularyReport vocabulary() const {
    VocabularyReport report;
    if (!model_.head_is_resident()) report.head = model_.head_statistics();
    if (!model_.embedding_is_resident()) report.embedding = model_.embedding_reads();
    return report;
  }

  [[nodiscard]] ExpectedMemory& memory() noexcept { return memory_; }
  [[nodiscard]] const ExpectedMemory& memory() const noexcept { return memory_; }

  /// @brief What an adapter can be made or loaded for.
  [[nodiscard]] std::vector<block_streamer::LoraBlock> lora_blocks() const {
    std::vector<block_streamer::LoraBlock> list;
    const auto blocks = model_.blocks();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      list.push_back({model_.layout().blocks[i].prefix, blocks[i].weight_specs()});
    }
    return list;
  }
  /// @brief Weaves the adapter in, in place of an earlier one.
  void attach(block_streamer::LoraAdapter adapter) {
    streamer_.attach(adapter.table(lora_blocks()));
    adapter_ = std::move(adapter);
  }
  /// @brief Of several folders the sum is woven in, and none of them trains.
  void load_adapters(const std::vector<std::filesystem::path>& folders) {
    const auto load = [&](const std::filesystem::path& folder) {
      return load_fitting_adapter(folder, model_.checkpoint().folder(), lora_blocks(),
                                  model_.device());
    };
    if (folders.size() == 1) return attach(load(folders.front()));
    block_streamer::AdapterSet set{lora_blocks()};
    for (const auto& folder : folders) set.add(folder.string(), load(folder));
    set.activate(set.names());
    streamer_.attach(set.table());
    adapter_.reset();
    for (const std::string& name : set.names())
      adapter_parameters_ += set.at(name).parameter_count();
  }
  /// @brief Elements of what is woven in.
  [[nodiscard]] std::uint64_t adapter_parameters() const noexcept {
    return adapter_ ? adapter_->parameter_count() : adapter_parameters_;
  }
  /// @brief The adapter woven in; nullopt: none, or a sum of several.
  [[nodiscard]] const std::optional<block_streamer::LoraAdapter>& adapter() const noexcept {
    return adapter_;
  }

 private:
  /// What is decided before anything large is read.
  struct Plan {
    Plan(block_streamer::Checkpoint opened, at::Device device, const CommonOptions& options,
         std::optional<std::uint64_t> free_memory)
        : checkpoint{std::move(opened)} {
      program = block_streamer::resident_memory().value_or(0);
      std::vector<std::string> ignored;  // the model reads it again and keeps them
      const auto config = block_streamer::read_model_config(checkpoint.folder(), ignored);
      const auto layout = block_streamer::describe_model(config, checkpoint);
      const auto summary = block_streamer::summarize(layout, checkpoint);
      type = choose_compute_type(options.dtype, config, checkpoint, device);
      resident =
          choose_resident(options, Vocabulary{layout, checkpoint}, summary, type, free_memory);
      storage = choose_storage(options.storage, options.ram_budget,
                               summary_with(summary, resident, layout, checkpoint), type);
    }
    block_streamer::Checkpoint checkpoint;
    std::uint64_t program = 0;  ///< memory of the process before
    block_streamer::DType type;
    ResidentChoice resident;
    StorageChoice storage;
  };

  LoadedModel(Backend backend, at::Device device, const CommonOptions& options,
              block_streamer::TraceSinkRef trace, Plan plan)
      : model_{plan.checkpoint,
               {.dtype = plan.type,
                .device = device,
                .embedding_resident = plan.resident.embedding,
                .head_resident = plan.resident.head}},
        streamer_{model_.blocks(), open_storage(plan, options), backend,
                  streamer_options(options, plan, trace)} {
    if (!model_.head_is_resident()) stream_head(plan, options, backend);
    forecast_standing(plan, options, backend.host_addressable());
    say_what_is_in_memory(plan.storage, streamer_.shape(), streamer_.block_count());
    say_what_stays_on_the_device(options.device_budget, streamer_.shape(), streamer_.block_count());
    for (const std::string& warning : plan.checkpoint.warnings()) say("warning: " + warning);
    for (const std::string& warning : model_.warnings()) say("warning: " + warning);
  }

  [[nodiscard]] block_streamer::AnyStorage open_storage(const Plan& plan,
                                                        const CommonOptions& options) {
    expect_budget_holds_a_block(options.device_budget, plan.storage.tier, model_.block_map(),
                                plan.type);
    const bool tiered = plan.storage.tier == "tiered";
    auto storage =
        make_storage(tiered ? "io_uring" : plan.storage.tier, model_.block_map(), plan.type);
    if (options.verify_reads) storage = verified_storage(std::move(storage), model_);
    if (tiered)
      storage = block_streamer::TieredStorage::within(std::move(storage), plan.storage.ram_budget);
    count_memory(storage, plan, options.prefetch_ahead);
    return storage;
  }
  /// What a storage holds of the host's memory, or maps into it.
  void count_memory(const block_streamer::AnyStorage& storage, const Plan& plan,
                    std::uint32_t prefetch_ahead) {
    for (const auto region : storage.regions()) memory_.standing.blocks += region.size();
    if (plan.storage.tier != "mmap") return;
    std::uint64_t all = 0, largest = 0;
    for (std::size_t i = 0; i < storage.block_count(); ++i) {
      const std::uint64_t bytes = storage.image(block_streamer::block_at(i)).byte_count;
      all += bytes;
      largest = std::max(largest, bytes);
    }
    // Pages that were passed leave the process: those of the visit before may still be there.
    memory_.standing.blocks += std::min(all, (std::uint64_t{prefetch_ahead} + 2) * largest);
  }
  void forecast_standing(const Plan& plan, const CommonOptions& options, bool device_is_host) {
    block_streamer::MemoryForecast& standing = memory_.standing;
    standing.program = plan.program;
    standing.resident = model_.final_norm().nbytes();
    if (model_.embedding_is_resident()) standing.resident += model_.embedding().nbytes();
    if (model_.head_is_resident() && !model_.head().is_same(model_.embedding()))
      standing.resident += model_.head().nbytes();
    const block_streamer::TransferShape& shape = streamer_.shape();
    add_pipeline(standing, shape);
    if (!model_.head_is_resident()) {
      const Vocabulary vocabulary{model_.layout(), plan.checkpoint};
      standing.slots += detail::ResidentCosts{options, vocabulary, plan.type}.none;
    }
    if (!device_is_host && shape.memory_block_count > 0)
      standing.locked_blocks =
          standing.blocks / shape.memory_block_count * shape.locked_block_count;
    memory_.offloads_inputs = leave_the_device(options.activations, device_is_host);
  }

  /// The slices wait where the blocks do; where only some of those are in memory, the slices are
  /// not among them.
  void stream_head(const Plan& plan, const CommonOptions& options, Backend backend) {
    const bool tiered = plan.storage.tier == "tiered";
    block_streamer::PipelineOptions pipeline;
    pipeline.prefetch_ahead = options.prefetch_ahead;
    auto storage =
        make_storage(tiered ? "io_uring" : plan.storage.tier, model_.head_map(), plan.type, "head");
    count_memory(storage, plan, options.prefetch_ahead);
    block_streamer::models::stream_head(model_, std::move(storage), std::move(backend), pipeline);
  }

  static block_streamer::StreamerOptions streamer_options(const CommonOptions& options,
                                                          const Plan& plan,
                                                          block_streamer::TraceSinkRef trace) {
    block_streamer::StreamerOptions result;
    result.prefetch_ahead = options.prefetch_ahead;
    result.device_budget = options.device_budget;
    result.trace = trace;
    result.dtype = plan.type;
    if (plan.storage.tier == "io_uring" || plan.storage.tier == "tiered")
      result.chunk_byte_count = block_streamer::UringStorage::chunk_byte_count;
    result.activations = options.activations;
    return result;
  }

  ExpectedMemory memory_;  // before the streamer, whose storage counts
  block_streamer::models::DecoderModel model_;
  Streamer streamer_;
  std::optional<block_streamer::LoraAdapter> adapter_;
  std::uint64_t adapter_parameters_ = 0;  // of several
};

}  // namespace block_streamer_cli
