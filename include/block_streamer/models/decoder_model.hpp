// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/architecture/registry.hpp>
#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/layers/kv_cache.hpp>
#include <block_streamer/layers/rms_norm.hpp>
#include <block_streamer/layers/rotary.hpp>
#include <block_streamer/models/decoder_block.hpp>
#include <block_streamer/models/decoder_context.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::models {

struct DecoderOptions {
  std::optional<DType>
      dtype{};  ///< what the model computes in; nullopt: as the embedding is stored
  at::Device device = at::kCPU;  ///< where it computes
};

/// @brief The rotary frequencies of a configuration: (D/2), f32, on the CPU.
/// @throws UnsupportedError naming a rope type that is not implemented.
[[nodiscard]] inline at::Tensor rotary_frequencies_of(const ModelConfig& config) {
  const at::Tensor plain =
      rotary_frequencies(static_cast<std::int64_t>(config.head_dim), config.rope.theta);
  if (config.rope.type == "default") return plain;
  if (config.rope.type != "llama3") {
    throw UnsupportedError{config.path + ": rope type '" + config.rope.type +
                           "' is not implemented"};
  }
  return llama3_frequencies(
      plain, {config.rope.factor, config.rope.low_freq_factor, config.rope.high_freq_factor,
              static_cast<double>(config.rope.original_max_position)});
}

/// @brief A decoder model around its streamed blocks: what stays resident (embedding, final norm,
/// head), the way in and the way out. Use Llama or Qwen3 where the family is known.
/// @code
///   models::Llama model{Checkpoint::open(folder)};
///   std::vector<models::LlamaBlock> blocks = model.blocks();           // streamed
///   models::DecoderContext context = model.context(ids);
///   at::Tensor hidden = streamer.forward(model.embed(ids), context);   // (B,T,C)
///   at::Tensor logits = model.logits(hidden);                          // (B,T,V)
/// @endcode
/// **Threads.** const functions from any thread. **Cost.** Holds V·C + C elements, twice V·C where
/// the head is not tied.
class DecoderModel {
 public:
  /// @throws the errors of read_model_config(), describe_model() and load_tensor().
  explicit DecoderModel(Checkpoint checkpoint, const DecoderOptions& options = {})
      : checkpoint_{std::move(checkpoint)},
        config_{read_model_config(checkpoint_.folder(), warnings_)},
        layout_{describe_model(config_, checkpoint_)},
        dtype_{options.dtype.value_or(checkpoint_.at(layout_.embedding).spec.dtype)},
        device_{options.device},
        frequencies_{rotary_frequencies_of(config_).to(options.device)} {
    expects(is_computable(dtype_), "the model computes in F16, BF16, F32 or F64");
    warnings_.insert(warnings_.end(), layout_.warnings.begin(), layout_.warnings.end());
    embedding_ = load_tensor(checkpoint_, layout_.embedding, dtype_, device_);
    final_norm_ = load_tensor(checkpoint_, layout_.final_norm, dtype_, device_);
    head_ = layout_.tied ? embedding_ : load_tensor(checkpoint_, layout_.head, dtype_, device_);
  }

  /// @brief The blocks in order; each knows its place in a KV cache.
  [[nodiscard]] std::vector<DecoderBlock> blocks() const {
    std::vector<DecoderBlock> blocks;
    for (std::size_t layer = 0; layer < config_.layer_count; ++layer) {
      blocks.emplace_back(config_, layer);
    }
    return blocks;
  }

  /// @brief Where the blocks lie in the checkpoint's files, for a storage tier.
  [[nodiscard]] BlockMap block_map(std::uint32_t read_granularity = 1) const {
    return make_block_map(checkpoint_, layout_.blocks, read_granularity);
  }

  /// @brief The hidden state that enters block 0. ids: (B,T), i64, on any device; result (B,T,C).
  /// @throws Error naming an id outside the vocabulary, if the ids are on the CPU.
  [[nodiscard]] at::Tensor embed(const at::Tensor& ids) const {
    expects(ids.dim() == 2 && ids.scalar_type() == at::kLong, "ids are (B,T) and i64");
    if (ids.is_cpu()) check_ids(ids);
    return at::embedding(embedding_, ids.to(device_));
  }

  /// @brief The context of one pass over ids of that shape. @see make_context
  /// @throws Error if the pass reaches beyond the positions that the model has.
  [[nodiscard]] DecoderContext context(std::int64_t batch, std::int64_t tokens,
                                       const ContextOptions& options = {}) const {
    const std::int64_t past = options.cache == nullptr ? 0 : options.cache->length();
    if (past + tokens > static_cast<std::int64_t>(config_.max_position)) {
      throw Error{"a sequence of " + std::to_string(past + tokens) +
                  " tokens is longer than the model's " + std::to_string(config_.max_position) +
                  " positions (max_position_embeddings in " + config_.path + ")"};
    }
    return make_context(batch, tokens, frequencies_, scalar_type_of(dtype_), options);
  }
  [[nodiscard]] DecoderContext context(const at::Tensor& ids,
                                       const ContextOptions& options = {}) const {
    expects(ids.dim() == 2, "ids are (B,T)");
    return context(ids.size(0), ids.size(1), options);
  }

  /// @brief An empty KV cache for `batch` sequences of up to `capacity` tokens.
  [[nodiscard]] KvCache make_cache(std::int64_t batch, std::int64_t capacity) const {
    return KvCache{{static_cast<std::int64_t>(config_.layer_count), batch,
                    static_cast<std::int64_t>(config_.kv_head_count), capacity,
                    static_cast<std::int64_t>(config_.head_dim)},
                   scalar_type_of(dtype_),
                   device_};
  }

  /// @brief hidden: (B,T,C), what left the last block; result: (B,T,V), in the model's type.
  [[nodiscard]] at::Tensor logits(const at::Tensor& hidden) const {
    return at::linear(rms_norm(hidden, final_norm_, config_.rms_norm_eps), head_);
  }
  /// @brief Logits of the last token of each row: (B,V). With padding at the left, all rows' next.
  [[nodiscard]] at::Tensor logits_last(const at::Tensor& hidden) const {
    return logits(hidden.narrow(1, hidden.size(1) - 1, 1)).squeeze(1);
  }

  [[nodiscard]] const Checkpoint& checkpoint() const noexcept { return checkpoint_; }
  [[nodiscard]] const ModelConfig& config() const noexcept { return config_; }
  [[nodiscard]] const ModelLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] at::Device device() const noexcept { return device_; }
  /// @brief What is odd but harmless, one line each: to be shown to the user once.
  [[nodiscard]] const std::vector<std::string>& warnings() const noexcept { return warnings_; }

  [[nodiscard]] const at::Tensor& embedding() const noexcept { return embedding_; }    ///< (V,C)
  [[nodiscard]] const at::Tensor& final_norm() const noexcept { return final_norm_; }  ///< (C)
  [[nodiscard]] const at::Tensor& head() const noexcept { return head_; }  ///< (V,C), maybe tied

 private:
  void check_ids(const at::Tensor& ids) const {
    if (ids.numel() == 0) return;
    for (const std::int64_t id : {ids.min().item<std::int64_t>(), ids.max().item<std::int64_t>()}) {
      if (id < 0 || id >= static_cast<std::int64_t>(config_.vocabulary_size)) {
        throw Error{"token id " + std::to_string(id) + " is outside the model's vocabulary of " +
                    std::to_string(config_.vocabulary_size)};
      }
    }
  }

  Checkpoint checkpoint_;
  std::vector<std::string> warnings_;
  ModelConfig config_;
  ModelLayout layout_;
  DType dtype_;
  at::Device device_;
  at::Tensor frequencies_;
  at::Tensor embedding_;
  at::Tensor final_norm_;
  at::Tensor head_;
};

namespace detail {
/// A model whose checkpoint must be of one family.
template <ModelFamily family>
class FamilyModel : public DecoderModel {
 public:
  /// @throws UnsupportedError if the checkpoint is of another family; else as DecoderModel.
  explicit FamilyModel(Checkpoint checkpoint, const DecoderOptions& options = {})
      : DecoderModel{std::move(checkpoint), options} {
    if (layout().family != family) {
      throw UnsupportedError{config().path + ": model_type is " + config().model_type +
                             ", a model of type " + std::string{name_of(family)} +
                             " was asked for"};
    }
  }
};
}  // namespace detail

}  // namespace block_streamer::inline v1::models
