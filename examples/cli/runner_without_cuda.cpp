// SPDX-License-Identifier: Apache-2.0
// Stands in for runner_cuda.cpp where the program is built without CUDA.
#include "model_runner.hpp"

#include <block_streamer/core/error.hpp>

namespace block_streamer_cli {

std::optional<std::string> why_cuda_is_off() {
  return "the program is built without it";
}

std::unique_ptr<ModelRunner> open_cuda_runner(const CommonOptions&, int) {
  throw block_streamer::UnsupportedError{"the program is built without CUDA"};
}

std::unique_ptr<TrainingRunner> open_cuda_full_runner(const CommonOptions&, const FinetuneOptions&,
                                                      int) {
  throw block_streamer::UnsupportedError{"the program is built without CUDA"};
}

}  // namespace block_streamer_cli
