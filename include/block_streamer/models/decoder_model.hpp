// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/architecture/registry.hpp>
#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/stored_rows.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/checkpoint/row_slices.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/layers/kv_cache.hpp>
#include <block_streamer/layers/rms_norm.hpp>
#include <block_streamer/layers/rotary.hpp>
#include <block_streamer/models/decoder_block.hpp>
#include <block_streamer/models/decoder_context.hpp>
#include <block_streamer/models/stored_embedding.hpp>
#include <block_streamer/trace/row_reads.hpp>
#include <block_streamer/trace/statistics.hpp>
#include <block_streamer/train/sliced_linear.hpp>
#include <block_streamer/train/sliced_matrix.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::models {

struct DecoderOptions {
  std::optional<DType>
      dtype{};  ///< what the model computes in; nullopt: as the embedding is stored
  at::Device device = at::kCPU;  ///< where it computes
  /// False: the embedding stays in its file, and the rows of the tokens at hand are read from it.
  /// With a tied head that is resident there is nothing to read: the embedding is that tensor.
  bool embedding_resident = true;
  /// False: the head is streamed in slices of rows; see stream_head().
  bool head_resident = true;
  /// Most elements of such a slice. A resident head is computed in the same slices, as that is what
  /// makes the bits the same.
  std::uint64_t head_slice_elements = default_slice_elements;
};

/// @brief The rotary frequencies of a configuration: (D/2), f32, on the CPU.
/// @throws UnsupportedError naming a rope type that is not implemented.
[[nodiscard]] inline at::Tensor rotary_frequencies_of(const ModelConfig& config) {
  at::Tensor plain =
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

/// @brief A decoder model around its streamed blocks: what is not a block (embedding, final norm,
/// head), the way in and the way out. Use Llama or Qwen3 where the family is known. Embedding and
/// head stay on the device unless the options say otherwise; no bit depends on that.
/// @code
///   models::Llama model{Checkpoint::open(folder)};
///   std::vector<models::LlamaBlock> blocks = model.blocks();           // streamed
///   models::DecoderContext context = model.context(ids);
///   at::Tensor hidden = streamer.forward(model.embed(ids), context);   // (B,T,C)
///   at::Tensor logits = model.logits(hidden);                          // (B,T,V)
/// @endcode
/// **Threads.** const functions from any thread; with a streamed head, logits() from one at a time.
/// **Cost.** Holds C elements, and V·C for each of embedding and head that is resident, once if the
/// head is tied. Copies share them.
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
    final_norm_ = load_tensor(checkpoint_, layout_.final_norm, dtype_, device_);
    head_slices_ =
        slice_rows(config_.vocabulary_size, config_.hidden_size, options.head_slice_elements);
    load_vocabulary(options);
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

  /// @brief Where the head's slices lie, for the storage tier of a head that is streamed.
  [[nodiscard]] BlockMap head_map(std::uint32_t read_granularity = 1) const {
    return make_row_slice_map(checkpoint_, layout_.head, head_slices_, read_granularity);
  }
  [[nodiscard]] const std::vector<RowRange>& head_slices() const noexcept { return head_slices_; }

  /// @brief The hidden state that enters block 0. ids: (B,T), i64, on any device; result (B,T,C).
  /// @throws Error naming an id outside the vocabulary, if the ids are on the CPU or the embedding
  /// is not resident; then StorageError as well, if a row cannot be read.
  /// **Cost.** Of an embedding that is not resident: @see embed_stored. Ids that are not on the CPU
  /// are then waited for.
  [[nodiscard]] at::Tensor embed(const at::Tensor& ids) const {
    expects(ids.dim() == 2 && ids.scalar_type() == at::kLong, "ids are (B,T) and i64");
    if (embedding_rows_ != nullptr) {
      const at::Tensor on_host = ids.cpu();
      check_ids(on_host);
      return embed_stored(*embedding_rows_, on_host, dtype_, device_);
    }
    if (ids.is_cpu()) check_ids(ids);
    return at::embedding(embedding_, ids.to(device_));
  }

  /// @brief The context of one pass over ids of that shape. @see make_context
  /// @throws Error if the pass reaches beyond the positions that the model has.
  [[nodiscard]] DecoderContext context(std::int64_t batch, std::int64_t tokens,
                                       const ContextOptions& options = {}) const {
    const std::int64_t past = options.cache == nullptr ? 0 : options.cache->length();
    const auto& packed = options.sequences;
    const std::int64_t longest =
        packed.empty() ? past + tokens : *std::max_element(packed.begin(), packed.end());
    if (longest > static_cast<std::int64_t>(config_.max_position)) {
      throw Error{"a sequence of " + std::to_string(longest) +
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
  /// **Cost.** A streamed head is fetched once, and once more in a backward.
  /// @throws UnsupportedError under autocast if the head is streamed; what its storage throws.
  /// @pre the head is resident, or stream_head() was called.
  [[nodiscard]] at::Tensor logits(const at::Tensor& hidden) const {
    expects(head_matrix_ != nullptr,
            "a head that is not resident is streamed: call stream_head() before logits()");
    const at::Tensor normed = rms_norm(hidden, final_norm_, config_.rms_norm_eps);
    // The caller's own uses of a head that is there: LibTorch's graph and casts.
    if (head_.defined() &&
        (head_.requires_grad() || at::autocast::is_autocast_enabled(device_.type()))) {
      return at::linear(normed, head_);
    }
    return sliced_linear(head_matrix_, normed);
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

  [[nodiscard]] bool embedding_is_resident() const noexcept { return embedding_.defined(); }
  [[nodiscard]] bool head_is_resident() const noexcept { return head_.defined(); }
  [[nodiscard]] const at::Tensor& final_norm() const noexcept { return final_norm_; }  ///< (C)
  /// @brief (V,C); not defined if it is not resident.
  [[nodiscard]] const at::Tensor& embedding() const noexcept { return embedding_; }
  /// @brief (V,C), maybe the embedding; not defined if it is not resident.
  [[nodiscard]] const at::Tensor& head() const noexcept { return head_; }

  /// @brief What was read of an embedding that is not resident.
  [[nodiscard]] RowReads embedding_reads() const noexcept {
    return embedding_rows_ == nullptr ? RowReads{} : embedding_rows_->reads();
  }
  /// @brief What streaming the head has cost; zeros if it is resident.
  [[nodiscard]] Statistics head_statistics() const {
    return head_matrix_ == nullptr ? Statistics{} : head_matrix_->statistics();
  }
  /// @brief What logits() multiplies with from now on; stream_head() is the usual way here.
  /// @pre a matrix (V,C) in head_slices(), in the model's type on its device; the head is not
  /// resident.
  void use_head(std::shared_ptr<SlicedMatrix> head) {
    expects(!head_is_resident(), "a head that is resident is not streamed");
    expects(head != nullptr && head->slices() == head_slices_, "the head has the model's slices");
    head_matrix_ = std::move(head);
  }

 private:
  /// A tied table is on the device if either of its uses is to be there.
  void load_vocabulary(const DecoderOptions& options) {
    const bool table = options.embedding_resident || (layout_.tied && options.head_resident);
    if (table) {
      embedding_ = load_tensor(checkpoint_, layout_.embedding, dtype_, device_);
    } else {
      embedding_rows_ = std::make_shared<const StoredRows>(checkpoint_, layout_.embedding);
    }
    if (layout_.tied) {
      head_ = embedding_;
    } else if (options.head_resident) {
      head_ = load_tensor(checkpoint_, layout_.head, dtype_, device_);
    }
    if (head_.defined()) head_matrix_ = std::make_shared<ResidentMatrix>(head_, head_slices_);
  }
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
  at::Tensor embedding_;  ///< or
  std::shared_ptr<const StoredRows> embedding_rows_;
  at::Tensor final_norm_;
  at::Tensor head_;
  std::vector<RowRange> head_slices_;
  std::shared_ptr<SlicedMatrix> head_matrix_;  ///< null: to be streamed, but from nowhere yet
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
