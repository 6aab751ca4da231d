// SPDX-License-Identifier: Apache-2.0
// What training all of a model's parameters takes, said and checked before anything large is read.
#pragma once

#include "common_options.hpp"
#include "console.hpp"
#include "jobs.hpp"

#include <block_streamer/architecture/model_summary.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/micro_batch_order.hpp>
#include <block_streamer/os/limits.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// Bytes by what they are for.
using MemoryParts = std::vector<std::pair<std::string, std::uint64_t>>;

struct FullMemory {
  MemoryParts host;
  MemoryParts device;               ///< on the CPU, memory like the host's
  std::uint64_t largest_input = 0;  ///< most bytes of blocks' inputs that wait for the backward
};

/// @param type  what the model computes in.
[[nodiscard]] inline FullMemory full_memory(const CommonOptions& common,
                                            const FinetuneOptions& options,
                                            const block_streamer::ModelConfig& config,
                                            const block_streamer::ModelSummary& summary,
                                            block_streamer::DType type, bool on_host) {
  constexpr std::uint64_t fp32 = 4;
  const std::uint64_t item = block_streamer::byte_count_of(type);
  const bool converted = type != block_streamer::DType::f32;
  const std::uint64_t blocks = summary.streamed.parameter_count;
  const std::uint64_t residents = summary.resident.parameter_count;
  const std::uint64_t largest = largest_parameter_count(summary);
  const std::uint64_t slots =
      std::min(fp32 * blocks,
               (std::uint64_t{common.prefetch_ahead} + 1) * fp32 * largest + common.device_budget);
  FullMemory memory;
  memory.host = {{"blocks' weights in fp32", fp32 * blocks},
                 {"their gradients", fp32 * blocks},
                 {"AdamW's moments of them", 2 * fp32 * blocks}};
  // Embedding, norm and head: the weights, and what AdamW needs of each.
  memory.device = {
      {"slots of blocks", slots + (converted ? item * largest : 0)},
      {"embedding, norm and head with gradients and moments",
       residents * ((converted ? item : 0) + 4 * fp32)},
      {"the head's gradient on its way", 2 * fp32 * config.vocabulary_size * config.hidden_size}};
  if (!on_host) memory.device.emplace_back("gradients on their way", 2 * fp32 * largest);
  const bool together = options.micro_batches == block_streamer::MicroBatchOrder::together;
  memory.largest_input = config.layer_count * options.batch * (together ? options.grad_accum : 1) *
                         options.seq_len * config.hidden_size * item;
  return memory;
}

namespace detail {

[[nodiscard]] inline std::uint64_t total_of(const MemoryParts& parts) {
  std::uint64_t total = 0;
  for (const auto& [what, bytes] : parts) total += bytes;
  return total;
}
[[nodiscard]] inline std::string words_of(const MemoryParts& parts) {
  std::string text;
  for (const auto& [what, bytes] : parts)
    text += (text.empty() ? "" : ", ") + what + " " + readable_bytes(bytes);
  return text;
}
/// @param what  "memory" or "device memory". @param available  nullopt: not known.
inline void say_and_expect(const std::string& what, const MemoryParts& parts,
                           std::optional<std::uint64_t> available) {
  const std::uint64_t total = total_of(parts);
  const std::string needs = readable_bytes(total) + " of " + what + " (" + words_of(parts) + ")";
  const std::string room =
      available ? readable_bytes(*available) + " are available" : "how much there is is not known";
  if (available && total > *available) {
    throw block_streamer::Error{"--mode full needs " + needs + ", only " + room +
                                "; --mode lora takes a fraction of that"};
  }
  say("needs " + needs + "; " + room);
}

}  // namespace detail

/// @brief Says what is needed, and refuses what does not fit.
/// @param free_on_device  of a device with memory of its own; nullopt: not known, or on the host.
/// @throws Error with the numbers.
inline void expect_full_memory(const FullMemory& memory, bool on_host,
                               std::optional<std::uint64_t> free_on_device) {
  MemoryParts host = memory.host;
  if (on_host) host.insert(host.end(), memory.device.begin(), memory.device.end());
  detail::say_and_expect("memory", host, block_streamer::available_memory());
  if (!on_host) detail::say_and_expect("device memory", memory.device, free_on_device);
  say("on top of that: inputs of blocks, up to " + readable_bytes(memory.largest_input) +
      ", what one block computes, and a chunk of logits");
}

}  // namespace block_streamer_cli
