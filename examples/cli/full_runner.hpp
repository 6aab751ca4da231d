// SPDX-License-Identifier: Apache-2.0
// The TrainingRunner of a backend for all of a model's parameters. Included by one unit per device.
#pragma once

#include "backend_runner.hpp"
#include "finetune_job.hpp"
#include "full_model.hpp"
#include "full_training.hpp"
#include "translated.hpp"

namespace block_streamer_cli {

template <block_streamer::execution_backend Backend>
class FullRunner final : public BackendRunner<TrainingRunner, FullModel<Backend>, Backend> {
 public:
  using BackendRunner<TrainingRunner, FullModel<Backend>, Backend>::BackendRunner;

  [[nodiscard]] FinetuneReport finetune(const FinetuneJob& job) override {
    return translated([&] { return run_finetune<FullTraining<Backend>>(this->loaded(), job); });
  }
};

}  // namespace block_streamer_cli
