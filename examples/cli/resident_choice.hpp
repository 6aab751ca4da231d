// SPDX-License-Identifier: Apache-2.0
// What stays on the device besides the blocks' slots.
#pragma once

#include "common_options.hpp"
#include "console.hpp"
#include "vocabulary.hpp"

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/architecture/model_summary.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/core/dtype.hpp>
#include <block_streamer/os/limits.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

namespace block_streamer_cli {

/// Of a tied model both or neither.
struct ResidentChoice {
  bool embedding = true;
  bool head = true;
};

/// @brief What can be taken of the memory that the backend computes in; nullopt: not known.
template <class Backend>
[[nodiscard]] std::optional<std::uint64_t> free_device_memory(const Backend& backend) {
  if constexpr (requires { backend.properties().free_byte_count; }) {
    return backend.properties().free_byte_count;
  } else {
    return block_streamer::available_memory();
  }
}

namespace detail {

/// Bytes on the device of what waits for its turn: `slots` of them, and the place that a conversion
/// writes to.
[[nodiscard]] inline std::uint64_t slot_bytes(std::uint64_t slots, std::uint64_t stored_bytes,
                                              std::uint64_t computed_bytes) {
  return slots * stored_bytes + (computed_bytes == stored_bytes ? 0 : computed_bytes);
}

/// What each choice takes of the device besides the blocks, in bytes.
struct ResidentCosts {
  ResidentCosts(const CommonOptions& options, const Vocabulary& vocabulary,
                block_streamer::DType type)
      : slots{std::min<std::uint64_t>(std::uint64_t{options.prefetch_ahead} + 1,
                                      vocabulary.slice_count)} {
    const std::uint64_t item = block_streamer::byte_count_of(type);
    head = vocabulary.parameters * item;
    all = vocabulary.tied ? head : 2 * head;
    none = slot_bytes(slots, vocabulary.slice_bytes, vocabulary.slice_parameters * item);
  }
  std::uint64_t slots;  ///< of slices
  std::uint64_t all = 0;
  std::uint64_t head = 0;
  std::uint64_t none = 0;
};

inline void say_resident(const ResidentChoice& choice, const Vocabulary& vocabulary,
                         const ResidentCosts& costs, const std::string& why) {
  if (choice.embedding) return;
  std::string text = "resident: the head; rows of the embedding are read from its file";
  if (!choice.head) {
    text = "resident: " + vocabulary.words();
    if (costs.none >= costs.head) text += ", which takes no less of the device than keeping it";
  }
  say(text + why);
}

}  // namespace detail

/// @brief Resolves --resident; says what does not stay on the device, and why.
/// @param free_memory  of the device; nullopt: not known, then auto keeps all.
[[nodiscard]] inline ResidentChoice choose_resident(const CommonOptions& options,
                                                    const Vocabulary& vocabulary,
                                                    const block_streamer::ModelSummary& summary,
                                                    block_streamer::DType type,
                                                    std::optional<std::uint64_t> free_memory) {
  const ResidentChoice all{}, none{false, false};
  const ResidentChoice head{/*embedding=*/vocabulary.tied, /*head=*/true};
  const detail::ResidentCosts costs{options, vocabulary, type};
  ResidentChoice choice = all;
  std::string why;
  if (options.resident == "none") choice = none;
  if (options.resident == "head") choice = head;
  if (options.resident == "head" && vocabulary.tied) {
    say("resident: embedding and head, which are one tensor in this model");
  }
  if (options.resident == "auto" && free_memory) {
    const std::uint64_t item = block_streamer::byte_count_of(type);
    const std::uint64_t blocks = detail::slot_bytes(std::uint64_t{options.prefetch_ahead} + 1,
                                                    summary.largest_block_byte_count,
                                                    largest_parameter_count(summary) * item) +
                                 options.device_budget;
    const std::uint64_t fillable = block_streamer::fillable_memory(*free_memory);
    const auto fits = [&](std::uint64_t resident) { return blocks + resident <= fillable; };
    if (!fits(costs.all)) choice = fits(costs.head) || costs.none >= costs.head ? head : none;
    why = " (auto: embedding and head take " + readable_bytes(costs.all) + ", blocks " +
          readable_bytes(blocks) + ", only " + readable_bytes(fillable) +
          " of the device may be filled)";
  }
  detail::say_resident(choice, vocabulary, costs, why);
  return choice;
}

/// @brief The summary as it is once embedding and head are where `choice` puts them: a head that is
/// streamed waits in the storage, rows of the embedding wait in the file.
[[nodiscard]] inline block_streamer::ModelSummary summary_with(
    block_streamer::ModelSummary summary, const ResidentChoice& choice,
    const block_streamer::ModelLayout& layout, const block_streamer::Checkpoint& checkpoint) {
  block_streamer::TensorTotals embedding, head;
  embedding.add(checkpoint.at(layout.embedding));
  head.add(checkpoint.at(layout.head));
  const auto leave = [&](const block_streamer::TensorTotals& totals) {
    summary.resident.tensor_count -= totals.tensor_count;
    summary.resident.parameter_count -= totals.parameter_count;
    summary.resident.byte_count -= totals.byte_count;
  };
  if (!choice.embedding) leave(embedding);
  if (!choice.head) {
    if (!layout.tied) leave(head);
    summary.streamed.add(head);
  }
  return summary;
}

}  // namespace block_streamer_cli
