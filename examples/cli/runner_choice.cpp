// SPDX-License-Identifier: Apache-2.0
#include "console.hpp"
#include "model_runner.hpp"

#include <block_streamer/core/error.hpp>

#include <string>

namespace block_streamer_cli {

std::unique_ptr<ModelRunner> open_runner(const CommonOptions& options) {
  if (options.device == "cpu") return open_cpu_runner(options);
  const std::optional<std::string> off = why_cuda_is_off();
  if (options.device.empty()) {
    say(off ? "device: cpu (no CUDA: " + *off + ")" : "device: cuda:0 (a usable one is here)");
    return off ? open_cpu_runner(options) : open_cuda_runner(options, 0);
  }
  if (off) throw block_streamer::Error{"--device " + options.device + ": " + *off};
  const std::size_t colon = options.device.find(':');
  const int index = colon == std::string::npos ? 0 : std::stoi(options.device.substr(colon + 1));
  return open_cuda_runner(options, index);
}

}  // namespace block_streamer_cli
