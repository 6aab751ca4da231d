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

/// Bytes on the device of a number of parameters that wait for their turn: slots, and the place
/// that a conversion writes to.
[[nodiscard]] inline std::uint64_t slot_bytes(const CommonOptions& options,
                                              std::uint64_t stored_bytes, std::uint64_t parameters,
                                              block_streamer::DType type) {
  const std::uint64_t computed = parameters * block_streamer::byte_count_of(type);
  return (std::uint64_t{options.prefetch_ahead} + 1) * stored_bytes +
         (computed == stored_bytes ? 0 : computed);
}

inline void say_resident(const ResidentChoice& choice, const Vocabulary& vocabulary,
                         const std::string& why) {
  if (choice.embedding) return;
  say("resident: " +
      (choice.head ? "the head; rows of the embedding are read from its file"
                   : vocabulary.words()) +
      why);
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
  if (options.resident == "all") return all;
  const bool automatic = options.resident == "auto";
  ResidentChoice choice = options.resident == "none" ? none : automatic ? all : head;
  std::string why;
  if (automatic && free_memory) {
    const std::uint64_t largest = summary.largest_block_byte_count;
    const std::uint64_t blocks =
        detail::slot_bytes(options, largest, largest_parameter_count(summary), type) +
        options.device_budget;
    const std::uint64_t fillable = block_streamer::fillable_memory(*free_memory);
    const std::uint64_t table = vocabulary.parameters * block_streamer::byte_count_of(type);
    const auto fits = [&](std::uint64_t resident) { return blocks + resident <= fillable; };
    const std::uint64_t everything = vocabulary.tied ? table : 2 * table;
    if (!fits(everything)) choice = !vocabulary.tied && fits(table) ? head : none;
    why = " (auto: embedding and head take " + readable_bytes(everything) + ", blocks " +
          readable_bytes(blocks) + ", only " + readable_bytes(fillable) +
          " of the device may be filled)";
  }
  if (options.resident == "head" && vocabulary.tied) {
    say("resident: embedding and head, which are one tensor in this model");
  }
  detail::say_resident(choice, vocabulary, why);
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
