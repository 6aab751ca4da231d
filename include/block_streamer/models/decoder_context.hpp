// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/replayable_context.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/layers/attention.hpp>
#include <block_streamer/layers/kv_cache.hpp>
#include <block_streamer/layers/rotary.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::models {

/// Consecutive tokens that a block computes at once.
struct TokenChunk {
  std::int64_t begin = 0;  ///< first token, counted in this pass
  std::int64_t count = 0;
  AttentionTokens attention;
};

/// @brief What all blocks of one pass share: where the tokens stand and what they see.
/// Made by DecoderModel::context() for one pass. Without a cache it is immutable and a block may be
/// computed again with it; with one, a pass appends to the cache.
struct DecoderContext {
  std::vector<TokenChunk> chunks;  ///< cover the tokens of the pass in order
  KvCache* cache = nullptr;        ///< outlives the context

  /// @brief What a recorded pass takes from the context at hand: @see replayable_context.
  [[nodiscard]] std::vector<at::Tensor*> replayed() {
    std::vector<at::Tensor*> tensors;
    for (TokenChunk& chunk : chunks) {
      AttentionTokens& attention = chunk.attention;
      tensors.insert(tensors.end(),
                     {&attention.rotary.cos, &attention.rotary.sin, &attention.mask});
    }
    return tensors;
  }
  /// @brief False with a KV cache: each pass reads and writes other places of it.
  [[nodiscard]] bool replays_as(const DecoderContext& other) const {
    return cache == nullptr && other.cache == nullptr &&
           std::equal(chunks.begin(), chunks.end(), other.chunks.begin(), other.chunks.end(),
                      [](const TokenChunk& a, const TokenChunk& b) {
                        return a.begin == b.begin && a.count == b.count &&
                               a.attention.past == b.attention.past &&
                               a.attention.causal == b.attention.causal &&
                               a.attention.packed.lengths == b.attention.packed.lengths;
                      });
  }
};
static_assert(replayable_context<DecoderContext>);

/// How a pass is laid out.
struct ContextOptions {
  /// Tokens follow those in it and are added to it; null: a full pass, as for training.
  KvCache* cache = nullptr;
  /// Tokens at the start of each sequence that are none, one entry per row; empty: none. Counted
  /// from the first token ever, so the same for every pass over one cache. Padding at the right
  /// needs no word: no token sees what follows it.
  std::span<const std::int64_t> left_padding{};
  /// Most tokens that a block computes at once: bounds the memory of a long prompt. Needs a cache.
  std::int64_t chunk_tokens = std::numeric_limits<std::int64_t>::max();
  /// Lengths of independent sequences that lie one after another in the one row of the pass: each
  /// begins at position 0 and sees only itself. They add up to its tokens. Empty: rows are
  /// sequences. Without cache and padding.
  std::span<const std::int64_t> sequences{};
};

namespace detail {

/// @brief Builds the context of one pass. All tensors of it are made here, none in a block.
class ContextBuilder {
 public:
  ContextBuilder(const at::Tensor& frequencies, at::ScalarType dtype, const ContextOptions& options)
      : frequencies_{frequencies}, dtype_{dtype}, options_{options} {
    if (options.cache != nullptr) past_ = options.cache->length();
    const auto& padding = options.left_padding;
    if (std::any_of(padding.begin(), padding.end(), [](std::int64_t n) { return n != 0; })) {
      padding_ = at::tensor(at::IntArrayRef{padding.data(), padding.size()}, at::kLong)
                     .to(frequencies.device())
                     .unsqueeze(1);  // (B,1)
    }
  }

  [[nodiscard]] DecoderContext build(std::int64_t tokens) {
    DecoderContext context;
    context.cache = options_.cache;
    if (!options_.sequences.empty()) {
      context.chunks.push_back({0, tokens, packed()});
      return context;
    }
    const std::int64_t most = std::min(options_.chunk_tokens, tokens);
    if (tokens > most) prepare_band(tokens, most);
    for (std::int64_t begin = 0; begin < tokens; begin += most) {
      const std::int64_t count = std::min(most, tokens - begin);
      context.chunks.push_back({begin, count, chunk(past_ + begin, count)});
    }
    return context;
  }

 private:
  [[nodiscard]] at::Tensor range(std::int64_t begin, std::int64_t end) const {
    return at::arange(begin, end, frequencies_.options().dtype(at::kLong));
  }

  [[nodiscard]] AttentionTokens packed() const {
    std::vector<at::Tensor> positions;
    for (const std::int64_t length : options_.sequences) positions.push_back(range(0, length));
    return {0,
            rotary_table(at::cat(positions).unsqueeze(0), frequencies_, dtype_),
            {},
            false,
            PackedSequences::of(options_.sequences, frequencies_.device())};
  }

  /// Without padding the mask of every chunk is a window of one band: column c of row i is seen iff
  /// c − width ≤ i.
  void prepare_band(std::int64_t tokens, std::int64_t rows) {
    if (padding_.defined()) return;
    band_width_ = past_ + tokens;
    band_ = range(-band_width_, rows) <= range(0, rows).unsqueeze(1);  // (rows, width+rows)
  }

  [[nodiscard]] AttentionTokens chunk(std::int64_t past, std::int64_t count) const {
    at::Tensor positions = range(past, past + count).unsqueeze(0);            // (1,T)
    if (padding_.defined()) positions = (positions - padding_).clamp_min(0);  // (B,T)
    AttentionTokens tokens{past, rotary_table(positions, frequencies_, dtype_), {}, false};
    if (padding_.defined()) {
      tokens.mask = padded_mask(past, count);
    } else if (past == 0) {
      tokens.causal = count > 1;
    } else if (count > 1) {
      tokens.mask = band_mask(past, count);
    }
    return tokens;
  }

  [[nodiscard]] at::Tensor band_mask(std::int64_t past, std::int64_t count) const {
    if (!band_.defined()) {
      return (range(0, past + count) <= range(past, past + count).unsqueeze(1))
          .unsqueeze(0)
          .unsqueeze(0);
    }
    return band_.narrow(0, 0, count)
        .narrow(1, band_width_ - past, past + count)
        .unsqueeze(0)
        .unsqueeze(0);  // (1,1,T,past+T), a view
  }

  /// A padding token sees itself: a row that sees nothing would be NaN.
  [[nodiscard]] at::Tensor padded_mask(std::int64_t past, std::int64_t count) const {
    const at::Tensor keys = range(0, past + count);                     // (S)
    const at::Tensor queries = range(past, past + count).unsqueeze(1);  // (T,1)
    const at::Tensor real = (keys >= padding_).unsqueeze(1);            // (B,1,S)
    const at::Tensor seen = (keys <= queries).logical_and(real);        // (B,T,S)
    return seen.logical_or(keys == queries).unsqueeze(1);               // (B,1,T,S)
  }

  at::Tensor frequencies_;
  at::ScalarType dtype_;
  ContextOptions options_;
  std::int64_t past_ = 0;
  at::Tensor padding_;  ///< (B,1), undefined: none
  at::Tensor band_;
  std::int64_t band_width_ = 0;
};

}  // namespace detail

/// @brief The context of one pass over `tokens` tokens of `batch` sequences.
/// @param frequencies  rotary frequencies, f32, on the compute device.
/// @param dtype  of the hidden state.
/// **Cost.** Tables of T·D elements; a mask of T·(past + T) bytes where one is needed, times the
/// batch if sequences are padded; of chunk_tokens·(past + T) bytes if they are not but the pass is
/// chunked.
[[nodiscard]] inline DecoderContext make_context(std::int64_t batch, std::int64_t tokens,
                                                 const at::Tensor& frequencies,
                                                 at::ScalarType dtype,
                                                 const ContextOptions& options = {}) {
  expects(batch > 0 && tokens > 0, "a pass has at least one token");
  expects(options.chunk_tokens > 0, "chunk_tokens is positive");
  expects(options.cache != nullptr || options.chunk_tokens >= tokens,
          "only a pass with a KV cache is chunked");
  const auto& padding = options.left_padding;
  expects(padding.empty() || padding.size() == static_cast<std::size_t>(batch),
          "left_padding has one entry per row");
  expects(std::all_of(padding.begin(), padding.end(), [](std::int64_t n) { return n >= 0; }),
          "left_padding counts tokens");
  if (!options.sequences.empty()) {
    expects(batch == 1 && options.cache == nullptr && padding.empty(),
            "packed sequences are one row, without cache and padding");
    expects(std::all_of(options.sequences.begin(), options.sequences.end(),
                        [](std::int64_t n) { return n > 0; }) &&
                std::accumulate(options.sequences.begin(), options.sequences.end(),
                                std::int64_t{0}) == tokens,
            "packed sequences have tokens and add up to the pass");
  }
  if (const KvCache* cache = options.cache) {
    expects(cache->shape().batch == batch, "the KV cache is of the batch");
    expects(tokens <= cache->capacity() - cache->length(), "the KV cache has room for the pass");
  }
  return detail::ContextBuilder{frequencies, dtype, options}.build(tokens);
}

}  // namespace block_streamer::inline v1::models
