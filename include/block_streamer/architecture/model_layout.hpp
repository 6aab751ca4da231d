// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/architecture/registry.hpp>
#include <block_streamer/architecture/stored_names.hpp>
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/ids.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What of a checkpoint streams, what stays resident, and what is left alone.
struct ModelLayout {
  ModelFamily family = ModelFamily::llama;
  std::vector<BlockTensors> blocks;          ///< streamed, in the order of execution
  std::vector<ExpectedTensor> block_shapes;  ///< of every block, in the order of its names
  std::string embedding;                     ///< full names of resident tensors
  std::string final_norm;
  std::string head;  ///< equals `embedding` where tied
  bool tied = false;
  std::vector<std::string> resident;  ///< full names, each once
  std::vector<std::string> ignored;   ///< full names, sorted
  std::vector<std::string> warnings;  ///< one line each, to be shown to the user
};

namespace detail {

/// Checks one needed tensor. @throws BindingError, UnsupportedError naming tensor, file and cause.
inline void check_tensor(const ModelConfig& config, const Checkpoint& checkpoint,
                         const std::string& name, const Shape& shape) {
  const StoredTensor& stored = checkpoint.at(name);
  const std::string where = checkpoint.files()[stored.file].string() + ": tensor '" + name + "'";
  if (stored.spec.shape != shape) {
    throw BindingError{where + " has shape " + to_string(stored.spec.shape) + ", by " +
                       config.path + " it is " + to_string(shape)};
  }
  if (!is_floating_point(stored.spec.dtype) || byte_count_of(stored.spec.dtype) < 2) {
    throw UnsupportedError{where + " has type " + std::string{name_of(stored.spec.dtype)} +
                           ": quantised weights are not implemented"};
  }
}

/// Sorts the names of the checkpoint that the model does not need into ignored, refused and
/// unexpected ones.
class ExtraTensors {
 public:
  ExtraTensors(const ModelConfig& config, ModelLayout& layout) : config_{config}, layout_{layout} {
    names_.reserve(layout.block_shapes.size());
    for (const ExpectedTensor& tensor : layout.block_shapes) names_.push_back(tensor.name);
    std::sort(names_.begin(), names_.end());
  }

  /// @throws UnsupportedError naming the scheme of a quantised model.
  void see(std::string_view name, const std::string& file) {
    const auto parsed = parse_layer_name(name);
    if (parsed && parsed->layer >= config_.layer_count) {
      ++beyond_;
      layout_.ignored.emplace_back(name);
    } else if (is_rotary_table(name)) {
      layout_.ignored.emplace_back(name);
    } else if (const auto scheme = quantization_scheme(name); !scheme.empty()) {
      throw UnsupportedError{file + ": tensor '" + std::string{name} +
                             "' belongs to weights quantised as " + std::string{scheme} +
                             ", which is not implemented"};
    } else if (parsed) {
      if (!std::binary_search(names_.begin(), names_.end(), parsed->relative)) {
        remember_unexpected(*parsed, name);
      }
    } else if (name != embedding_name && name != final_norm_name && name != head_name) {
      foreign_.emplace_back(name);
      layout_.ignored.emplace_back(name);
    }
  }

  /// @throws BindingError naming tensors inside blocks that the model does not know.
  void finish(const Checkpoint& checkpoint) {
    if (unexpected_count_ != 0) {
      throw BindingError{checkpoint.folder().string() + ": " + std::to_string(unexpected_count_) +
                         " unexpected tensors in blocks of model_type " + config_.model_type +
                         ": " + unexpected_};
    }
    if (beyond_ != 0) {
      layout_.warnings.push_back(std::to_string(beyond_) + " tensors of layers from " +
                                 std::to_string(config_.layer_count) +
                                 " on are ignored, the model ends there");
    }
    if (!foreign_.empty()) {
      layout_.warnings.push_back(std::to_string(foreign_.size()) +
                                 " tensors outside the model are ignored, the first is '" +
                                 foreign_.front() + "'");
    }
  }

 private:
  void remember_unexpected(const LayerName& parsed, std::string_view name) {
    if (++unexpected_count_ > 5) return;
    unexpected_ += (unexpected_.empty() ? "'" : ", '") + std::string{name} + "' (" +
                   to_string(PartId{block_at(parsed.layer)}) + ")";
  }

  const ModelConfig& config_;
  ModelLayout& layout_;
  std::vector<std::string> names_;
  std::vector<std::string> foreign_;
  std::string unexpected_;
  std::size_t unexpected_count_ = 0;
  std::size_t beyond_ = 0;
};

/// Decides which tensor is the language model head.
/// - the file says tied: the embedding; a stored head is ignored with a warning, as released tied
///   models carry a redundant one (a head that really differs needs the flag set to false);
/// - the file says not tied: the stored head, and it must be there;
/// - the file says nothing: the stored head if there is one, else the embedding with a warning.
inline void choose_head(const ModelConfig& config, const Checkpoint& checkpoint,
                        ModelLayout& layout) {
  const auto unsupported = checkpoint.unsupported();
  const bool stored = checkpoint.find(head_name) != nullptr ||
                      std::any_of(unsupported.begin(), unsupported.end(),
                                  [](const UnsupportedTensor& t) { return t.name == head_name; });
  layout.tied = config.tie_word_embeddings || (!config.tie_is_explicit && !stored);
  layout.head = layout.tied ? layout.embedding : std::string{head_name};
  if (config.tie_word_embeddings && stored) {
    layout.ignored.emplace_back(head_name);
    layout.warnings.push_back("'lm_head.weight' is ignored: tie_word_embeddings is true in " +
                              config.path);
  }
  if (layout.tied && !config.tie_word_embeddings) {
    layout.warnings.push_back(checkpoint.folder().string() +
                              ": no 'lm_head.weight' and no tie_word_embeddings in " + config.path +
                              "; the embedding serves as head");
  }
  if (!layout.tied) {
    check_tensor(config, checkpoint, layout.head, {config.vocabulary_size, config.hidden_size});
    layout.resident.push_back(layout.head);
  }
}

}  // namespace detail

/// @brief Binds a configuration to a checkpoint, strictly: every tensor that the model needs is
/// there with its shape and a plain floating-point type, and no block holds one that the model does
/// not know. Stored rotary tables, layers from layer_count on and tensors outside the model are
/// ignored, the latter two with a warning.
/// @throws BindingError naming a tensor that is missing, unexpected or of another shape.
/// @throws UnsupportedError naming a quantisation scheme or a type that is not implemented.
/// **Cost.** O(n log n) in the number of stored tensors; no weight is read.
[[nodiscard]] inline ModelLayout describe_model(const ModelConfig& config,
                                                const Checkpoint& checkpoint) {
  ModelLayout layout;
  layout.family = family_of(config.model_type);
  layout.block_shapes = decoder_block_tensors(config);
  layout.embedding = embedding_name;
  layout.final_norm = final_norm_name;
  layout.resident = {layout.embedding, layout.final_norm};
  detail::ExtraTensors extra{config, layout};
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    extra.see(tensor.spec.name, checkpoint.files()[tensor.file].string());
  }
  for (const UnsupportedTensor& tensor : checkpoint.unsupported()) {
    extra.see(tensor.name, checkpoint.files()[tensor.file].string());
  }
  for (std::uint64_t layer = 0; layer < config.layer_count; ++layer) {
    BlockTensors& block = layout.blocks.emplace_back();
    block.prefix = decoder_block_prefix(layer);
    for (const ExpectedTensor& tensor : layout.block_shapes) {
      detail::check_tensor(config, checkpoint, block.prefix + tensor.name, tensor.shape);
      block.names.push_back(tensor.name);
    }
  }
  extra.finish(checkpoint);
  detail::check_tensor(config, checkpoint, layout.embedding,
                       {config.vocabulary_size, config.hidden_size});
  detail::check_tensor(config, checkpoint, layout.final_norm, {config.hidden_size});
  detail::choose_head(config, checkpoint, layout);
  std::sort(layout.ignored.begin(), layout.ignored.end());
  return layout;
}

}  // namespace block_streamer::inline v1
