// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// Model families whose blocks are implemented.
enum class ModelFamily : std::uint8_t { llama, qwen3 };

/// @brief The family's model_type as configurations spell it.
[[nodiscard]] constexpr std::string_view name_of(ModelFamily family) noexcept {
  return family == ModelFamily::llama ? "llama" : "qwen3";
}

/// @brief The family of a configuration's model_type.
/// @throws UnsupportedError naming the type and those that are implemented.
[[nodiscard]] inline ModelFamily family_of(std::string_view model_type) {
  for (const ModelFamily family : {ModelFamily::llama, ModelFamily::qwen3}) {
    if (name_of(family) == model_type) return family;
  }
  throw UnsupportedError{"model_type '" + std::string{model_type} +
                         "' is not implemented (implemented: llama, qwen3)"};
}

}  // namespace block_streamer::inline v1
