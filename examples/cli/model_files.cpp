// SPDX-License-Identifier: Apache-2.0
#include "model_files.hpp"

#include <block_streamer/checkpoint/shard_folder.hpp>
#include <block_streamer/core/error.hpp>

#include <system_error>

namespace bs = block_streamer;

namespace block_streamer_cli {

std::filesystem::path require_model_folder(const std::filesystem::path& model) {
  std::error_code error;
  if (!std::filesystem::exists(model, error)) {
    throw bs::Error{"--model " + model.string() + ": there is no such folder"};
  }
  const bool is_folder = std::filesystem::is_directory(model, error);
  std::filesystem::path folder = is_folder ? model : model.parent_path();
  if (folder.empty()) folder = ".";
  bs::expect_conversion_ended(folder);
  if (!std::filesystem::exists(folder / "config.json", error) &&
      std::filesystem::exists(folder / "adapter_config.json", error)) {
    throw bs::Error{
        "--model " + model.string() +
        " is an adapter: --model names the model that it changes, --adapter the adapter"};
  }
  return folder;
}

ModelText::ModelText(const std::filesystem::path& model)
    : folder_{require_model_folder(model)}, tokenizer_{bs::Tokenizer::open(folder_)} {}

bs::ChatTemplate ModelText::chat_template() const {
  return bs::ChatTemplate::open(folder_);
}

const bs::ChatTemplate* ModelText::try_chat_template() const {
  if (!template_) {
    try {
      template_ = chat_template();
    } catch (const bs::Error&) {  // only rows with messages need one
      return nullptr;
    }
  }
  return &*template_;
}

}  // namespace block_streamer_cli
