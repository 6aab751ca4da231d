// SPDX-License-Identifier: Apache-2.0
#include "console.hpp"
#include "model_runner.hpp"

#include <block_streamer/core/error.hpp>

#include <optional>
#include <string>

namespace block_streamer_cli {

namespace {

/// The CUDA device that is meant; nullopt: the CPU.
std::optional<int> chosen_cuda_device(const CommonOptions& options) {
  if (options.device == "cpu") return std::nullopt;
  const std::optional<std::string> off = why_cuda_is_off();
  if (options.device.empty()) {
    say(off ? "device: cpu (no CUDA: " + *off + ")" : "device: cuda:0 (a usable one is here)");
    return off ? std::nullopt : std::optional{0};
  }
  if (off) throw block_streamer::Error{"--device " + options.device + ": " + *off};
  const std::size_t colon = options.device.find(':');
  return colon == std::string::npos ? 0 : std::stoi(options.device.substr(colon + 1));
}

}  // namespace

std::unique_ptr<ModelRunner> open_runner(const CommonOptions& options) {
  const std::optional<int> cuda = chosen_cuda_device(options);
  return cuda ? open_cuda_runner(options, *cuda) : open_cpu_runner(options);
}

std::unique_ptr<TrainingRunner> open_full_runner(const CommonOptions& options,
                                                 const FinetuneOptions& finetune) {
  const std::optional<int> cuda = chosen_cuda_device(options);
  return cuda ? open_cuda_full_runner(options, finetune, *cuda)
              : open_cpu_full_runner(options, finetune);
}

}  // namespace block_streamer_cli
