// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace block_streamer::inline v1 {

/// Elements of one token at the places of a decoder layer.
struct DecoderWidths {
  std::uint64_t hidden = 0;   ///< C
  std::uint64_t inner = 0;    ///< I, of the gated MLP
  std::uint64_t query = 0;    ///< all query heads together
  std::uint64_t key = 0;      ///< all key heads together; values alike
  bool normed_heads = false;  ///< queries and keys are normed before they are turned
};

/// How tokens go through a decoder model.
struct DecoderWork {
  DecoderWidths widths;
  std::uint64_t vocabulary = 0;
  std::uint64_t tokens = 0;           ///< B·T of one pass
  std::uint64_t passes = 1;           ///< micro-batches that pass each block together
  std::uint64_t item = 4;             ///< bytes of an element as computed with
  std::uint64_t kept_inputs = 0;      ///< blocks whose inputs wait for a backward; 0: no backward
  std::uint64_t scored = 0;           ///< most positions of a pass whose logits are taken
  std::uint64_t head_rows = 0;        ///< most of them at once
  std::uint64_t head_slice_rows = 0;  ///< of the vocabulary, where the head has several slices
  bool adapters = false;
  bool dropout = false;  ///< of the adapters
};

/// @brief Most bytes that one visit of one pass takes beside the layer's input and weights.
/// Without a backward: the MLP's three inner tensors and their product, or the product in fp32
/// where adapters want it so, and three of the hidden size. With one, the graph of a layer:
/// hidden-sized are both normed inputs, the sum between attention and MLP and the output; then
/// queries, keys, values and what attention gave; inner-sized are gate, up, silu(gate) and their
/// product, and what the backward of the last map (or of the product) makes of them; a byte per
/// element for each mask of a dropout.
[[nodiscard]] constexpr std::uint64_t visit_byte_count(const DecoderWork& work) noexcept {
  const DecoderWidths& w = work.widths;
  const std::uint64_t item = work.item, wide = work.adapters && item < 4 ? 4 : 0;
  if (work.kept_inputs == 0) {
    return work.tokens * (3 * w.hidden * item + w.inner * std::max(4 * item, 3 * item + wide));
  }
  std::uint64_t token = item * (4 * w.hidden + 2 * w.query + 2 * w.key);
  if (w.normed_heads) token += item * (w.query + w.key);
  std::uint64_t last_map = 5 * item;
  if (work.adapters) last_map += 4 + wide + (work.dropout ? 4 : 0);
  token += w.inner * std::max(6 * item, last_map);
  if (work.adapters && work.dropout) token += 5 * w.hidden + w.query + w.inner;
  return work.tokens * token;
}

/// @brief Most bytes that final norm, head and loss take at once: logits in fp32, twice in the
/// model's type where that is another and a backward follows (once without), one slice of them
/// where the head has several, and the rows that they are made of.
[[nodiscard]] constexpr std::uint64_t head_byte_count(const DecoderWork& work) noexcept {
  const std::uint64_t rows = std::min(work.scored, work.head_rows);
  const std::uint64_t copies = work.item == 4 ? 0 : work.kept_inputs > 0 ? 2 : 1;
  const std::uint64_t logits = work.vocabulary * (4 + copies * work.item);
  const std::uint64_t row = work.widths.hidden * (3 * work.item + 2 * 4);
  return rows * (logits + work.head_slice_rows * work.item + row);
}

/// @brief Predicted peaks of a run, in bytes, as terms that follow from shapes alone. What several
/// of them share (a device that is the host) is added up by device() and host().
struct MemoryForecast {
  // On the device
  std::uint64_t resident = 0;  ///< embedding, head, final norm
  std::uint64_t slots = 0;     ///< of blocks and head slices, and places of conversions
  std::uint64_t trained = 0;   ///< what trains there: itself, gradients, optimizer state
  std::uint64_t inputs = 0;    ///< of blocks, that wait for a backward
  std::uint64_t flow = 0;      ///< outputs, their gradients and what flows back, of all passes
  std::uint64_t cache = 0;     ///< keys and values of earlier tokens
  std::uint64_t visit = 0;     ///< @see visit_byte_count
  std::uint64_t head = 0;      ///< @see head_byte_count
  // Page-locked
  std::uint64_t staging = 0;
  std::uint64_t locked_blocks = 0;
  std::uint64_t parked_inputs = 0;  ///< of blocks, that wait off the device
  // Of the host besides
  std::uint64_t program = 0;  ///< resident before the model was opened
  std::uint64_t blocks = 0;   ///< held in memory, page-locked or not, or mapped

  /// @brief Visit and head are not at work at once.
  [[nodiscard]] constexpr std::uint64_t device() const noexcept {
    return resident + slots + trained + inputs + flow + cache + std::max(visit, head);
  }
  [[nodiscard]] constexpr std::uint64_t page_locked() const noexcept {
    return staging + locked_blocks + parked_inputs;
  }
  /// @param device_is_host  the device's memory is the host's.
  [[nodiscard]] constexpr std::uint64_t host(bool device_is_host) const noexcept {
    return program + blocks + staging + parked_inputs + (device_is_host ? device() : 0);
  }
};

/// @brief Fills in what follows from the work: inputs, flow, visit and head.
/// @param offloaded  the blocks' inputs leave the device: two of a pass stay there.
constexpr void add_work(MemoryForecast& forecast, const DecoderWork& work,
                        bool offloaded) noexcept {
  const std::uint64_t pass = work.tokens * work.widths.hidden * work.item;
  const std::uint64_t all = pass * work.passes, inputs = all * work.kept_inputs;
  forecast.inputs = offloaded ? std::min(inputs, 2 * pass) : inputs;
  forecast.parked_inputs = offloaded ? inputs : 0;
  forecast.flow = work.kept_inputs > 0 ? 3 * all + pass : 2 * pass;
  forecast.visit = visit_byte_count(work);
  forecast.head = head_byte_count(work);
}

}  // namespace block_streamer::inline v1
