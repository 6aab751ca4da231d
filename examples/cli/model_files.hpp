// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/chat_template.hpp>
#include <block_streamer/text/tokenizer.hpp>

#include <filesystem>
#include <optional>
#include <string>

namespace block_streamer_cli {

/// @throws Error in words if there is no such folder or .safetensors file, or a conversion into the
/// folder has not ended.
/// @returns the folder with the model's other files.
std::filesystem::path require_model_folder(const std::filesystem::path& model);

/// A model's tokenizer and, when asked for, its chat template.
class ModelText {
 public:
  explicit ModelText(const std::filesystem::path& model);

  [[nodiscard]] const block_streamer::Tokenizer& tokenizer() const noexcept { return tokenizer_; }
  /// @brief The chat template. @throws the errors of ChatTemplate::open().
  [[nodiscard]] block_streamer::ChatTemplate chat_template() const;
  /// @brief Null if the model has none, or none that is known; a row that needs it is then refused.
  [[nodiscard]] const block_streamer::ChatTemplate* try_chat_template() const;

 private:
  std::filesystem::path folder_;
  block_streamer::Tokenizer tokenizer_;
  mutable std::optional<block_streamer::ChatTemplate> template_;
};

}  // namespace block_streamer_cli
