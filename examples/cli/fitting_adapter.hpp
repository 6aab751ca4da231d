// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "console.hpp"

#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/peft_config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/peft_loading.hpp>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>

namespace block_streamer_cli {

namespace detail {

[[nodiscard]] inline std::string adapter_base(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "adapter_config.json";
  return block_streamer::parse_peft_config(
             path.string(), block_streamer::read_small_file(path, std::uint64_t{1} << 24))
      .base_model;
}

[[nodiscard]] inline std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}
/// Of "org/name" and "/models/name/" alike the name.
[[nodiscard]] inline std::string last_component(std::string path) {
  while (path.ends_with('/')) path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

/// False only if the two names have nothing to do with each other: a model's folder may be named
/// after the hub's name, or lie in a cache under it, or the other way round.
[[nodiscard]] inline bool may_be_base(const std::string& base, const std::filesystem::path& model) {
  std::error_code error;
  const std::filesystem::path place = std::filesystem::canonical(model, error);
  const std::string told = lower(base), here = lower((error ? model : place).string());
  return here.find(last_component(told)) != std::string::npos ||
         told.find(last_component(here)) != std::string::npos;
}

}  // namespace detail

/// @brief The adapter in a folder, for the blocks of the model in another. Says if it was made for
/// a model of another name.
/// @throws BindingError naming both, and the model that the adapter says it is for, if it is not
/// for these blocks; the errors of load_adapter().
[[nodiscard]] inline block_streamer::LoraAdapter load_fitting_adapter(
    const std::filesystem::path& folder, const std::filesystem::path& model,
    std::span<const block_streamer::LoraBlock> blocks, const at::Device& device) {
  try {
    auto adapter = block_streamer::load_adapter(folder, blocks, device);
    const std::string base = detail::adapter_base(folder);
    if (!base.empty() && !detail::may_be_base(base, model)) {
      say("the adapter in " + folder.string() + " was made for " + base + "; the model in " +
          model.string() + " has the same shapes, perhaps other weights");
    }
    return adapter;
  } catch (const block_streamer::BindingError& error) {
    const std::string base = detail::adapter_base(folder);
    throw block_streamer::BindingError{
        "the adapter in " + folder.string() + (base.empty() ? "" : ", made for " + base + ",") +
        " does not fit the model in " + model.string() + ": " + error.what()};
  }
}

}  // namespace block_streamer_cli
