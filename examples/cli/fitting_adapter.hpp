// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/peft_config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/peft_loading.hpp>

#include <filesystem>
#include <span>
#include <string>

namespace block_streamer_cli {

/// @brief The adapter in a folder, for the blocks of the model in another.
/// @throws BindingError naming both, and the model that the adapter says it is for, if it is not
/// for these blocks; the errors of load_adapter().
[[nodiscard]] inline block_streamer::LoraAdapter load_fitting_adapter(
    const std::filesystem::path& folder, const std::filesystem::path& model,
    std::span<const block_streamer::LoraBlock> blocks, const at::Device& device) {
  try {
    return block_streamer::load_adapter(folder, blocks, device);
  } catch (const block_streamer::BindingError& error) {
    const std::filesystem::path path = folder / "adapter_config.json";
    const std::string base =
        block_streamer::parse_peft_config(
            path.string(), block_streamer::read_small_file(path, std::uint64_t{1} << 24))
            .base_model;
    throw block_streamer::BindingError{
        "the adapter in " + folder.string() + (base.empty() ? "" : ", made for " + base + ",") +
        " does not fit the model in " + model.string() + ": " + error.what()};
  }
}

}  // namespace block_streamer_cli
