// SPDX-License-Identifier: Apache-2.0
// What a finetune makes: parameters while it trains, files when it saves.
#pragma once

#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/finetune/trained_model_files.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/models/resident_parameters.hpp>

#include <filesystem>
#include <string>
#include <utility>

namespace block_streamer_cli {

class RunProduct {
 public:
  RunProduct() = default;
  RunProduct(const RunProduct&) = delete;
  RunProduct& operator=(const RunProduct&) = delete;
  virtual ~RunProduct() = default;

  /// @brief "adapter": what messages call it.
  [[nodiscard]] virtual std::string name() const = 0;
  /// @brief What trains, under the names of the run's state.
  [[nodiscard]] virtual block_streamer::NamedTensors parameters() const = 0;
  /// @brief The parameters were written from outside, as by a state that is taken up.
  virtual void took_up() {}
  /// @brief Writes its files. @throws StorageError: what was there before is whole, or no loadable
  /// product is there.
  virtual void save(const std::filesystem::path& folder) const = 0;
  /// @brief True if the folder holds these files, byte for byte.
  [[nodiscard]] virtual bool is_in(const std::filesystem::path& folder) const = 0;
};

/// Shares the adapter's tensors.
class AdapterProduct final : public RunProduct {
 public:
  /// @param base_model  what its configuration names.
  AdapterProduct(block_streamer::LoraAdapter adapter, std::string base_model)
      : adapter_{std::move(adapter)}, base_model_{std::move(base_model)} {}

  [[nodiscard]] std::string name() const override { return "adapter"; }
  [[nodiscard]] block_streamer::NamedTensors parameters() const override {
    return adapter_.named_parameters();
  }
  void save(const std::filesystem::path& folder) const override {
    block_streamer::save_adapter(folder, adapter_, base_model_);
  }
  [[nodiscard]] bool is_in(const std::filesystem::path& folder) const override {
    return block_streamer::holds_adapter(folder, adapter_, base_model_);
  }

 private:
  block_streamer::LoraAdapter adapter_;
  std::string base_model_;
};

/// All of a model's weights. Shares its tensors.
class ModelProduct final : public RunProduct {
 public:
  /// @param files  of the same parameters. @param residents  outlives it.
  ModelProduct(block_streamer::NamedTensors parameters,
               const block_streamer::TrainedModelFiles& files,
               block_streamer::models::ResidentParameters& residents)
      : parameters_{std::move(parameters)}, files_{files}, residents_{residents} {}

  [[nodiscard]] std::string name() const override { return "model"; }
  [[nodiscard]] block_streamer::NamedTensors parameters() const override { return parameters_; }
  void took_up() override { residents_.refresh(); }
  void save(const std::filesystem::path& folder) const override { files_.save(folder); }
  [[nodiscard]] bool is_in(const std::filesystem::path& folder) const override {
    return files_.are_in(folder);
  }

 private:
  block_streamer::NamedTensors parameters_;
  const block_streamer::TrainedModelFiles& files_;
  block_streamer::models::ResidentParameters& residents_;
};

}  // namespace block_streamer_cli
