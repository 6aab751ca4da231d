// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/generate/sampling.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// Why a row ended.
enum class FinishReason : std::uint8_t {
  running,    ///< it has not
  eos,        ///< the model produced an end token
  stop_text,  ///< the text reached a stop text
  length,     ///< as many tokens as were asked for
  positions,  ///< the model has no further position
  cancelled,  ///< the caller wanted no more
};

/// @brief "eos", "stop_text", …
[[nodiscard]] constexpr std::string_view name_of(FinishReason reason) noexcept {
  switch (reason) {
    case FinishReason::running:
      return "running";
    case FinishReason::eos:
      return "eos";
    case FinishReason::stop_text:
      return "stop_text";
    case FinishReason::length:
      return "length";
    case FinishReason::positions:
      return "positions";
    case FinishReason::cancelled:
      return "cancelled";
  }
  return "unknown";
}

struct GenerationOptions {
  std::uint64_t max_new_tokens = 256;  ///< at least 1
  SamplingOptions sampling{};
  std::vector<std::int32_t> eos_ids{};    ///< any of them ends a row and is not part of its text
  std::vector<std::string> stop_texts{};  ///< not part of the text either
  /// Tokens of all rows together that a block computes at once while the prompts are read: bounds
  /// the memory of long prompts, costs no further fetch.
  std::int64_t chunk_tokens = 512;
};

/// What one row became.
struct GeneratedText {
  std::string text;               ///< without special tokens and stop text
  std::vector<std::int32_t> ids;  ///< the new tokens, a final end token included
  std::uint64_t prompt_token_count = 0;
  FinishReason finish_reason = FinishReason::running;
};

/// What a batch became and what it took.
struct GenerationReport {
  std::vector<GeneratedText> rows;
  std::uint64_t prompt_tokens = 0;  ///< of all rows, padding not counted
  std::uint64_t new_tokens = 0;     ///< of all rows
  std::uint64_t passes = 0;         ///< the reading of the prompts is the first
  double prefill_s = 0;             ///< until the first new token
  double decode_s = 0;              ///< from then on
};

/// Called on the generating thread between passes; each may be empty. What they throw ends the run.
struct GenerationObserver {
  /// Text of a row that is certain now: whole characters, nothing of a stop text.
  std::function<void(std::size_t row, std::string_view text)> text;
  /// After each pass: the new tokens of all rows so far.
  std::function<void(std::uint64_t new_tokens)> pass;
  /// Asked before each pass; true ends all rows with what they have.
  std::function<bool()> cancelled;
};

}  // namespace block_streamer::inline v1
