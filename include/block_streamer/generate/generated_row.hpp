// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/generate/generation.hpp>
#include <block_streamer/generate/sampling.hpp>
#include <block_streamer/generate/stop_text.hpp>
#include <block_streamer/text/streaming_decoder.hpp>
#include <block_streamer/text/tokenizer.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief One sequence in the making: chooses tokens, turns them into text, and knows when to stop.
/// **Threads.** One. **Lifetime.** Tokenizer and options outlive it.
class GeneratedRow {
 public:
  /// @param row  its place in the batch: which random stream it draws from.
  GeneratedRow(const Tokenizer& tokenizer, const GenerationOptions& options, std::size_t row,
               std::uint64_t prompt_token_count)
      : options_{&options},
        sampler_{options.sampling, row},
        decoder_{tokenizer},
        scanner_{options.stop_texts} {
    result_.prompt_token_count = prompt_token_count;
  }

  /// @brief Chooses the next token and returns the text that became certain. Call while running().
  /// @param logits  (V). @throws Error as Sampler::choose(), or if no token has the chosen id.
  [[nodiscard]] std::string step(std::span<const float> logits) {
    const std::int32_t id = sampler_.choose(logits);
    result_.ids.push_back(id);
    const auto& eos = options_->eos_ids;
    if (std::find(eos.begin(), eos.end(), id) != eos.end()) return finish(FinishReason::eos);
    std::string text = scanner_.push(decoder_.push(id));
    result_.text += text;
    if (scanner_.stopped()) {
      result_.finish_reason = FinishReason::stop_text;
    } else if (result_.ids.size() >= options_->max_new_tokens) {
      text += finish(FinishReason::length);
    }
    return text;
  }

  /// @brief Ends the row and returns the text that was held back.
  [[nodiscard]] std::string finish(FinishReason reason) {
    std::string rest = scanner_.push(decoder_.flush());
    if (scanner_.stopped()) reason = FinishReason::stop_text;
    rest += scanner_.flush();
    result_.text += rest;
    result_.finish_reason = reason;
    return rest;
  }

  [[nodiscard]] bool running() const noexcept {
    return result_.finish_reason == FinishReason::running;
  }
  [[nodiscard]] std::int32_t last_id() const { return result_.ids.back(); }
  [[nodiscard]] const GeneratedText& result() const noexcept { return result_; }
  [[nodiscard]] GeneratedText take() { return std::move(result_); }

 private:
  const GenerationOptions* options_;
  Sampler sampler_;
  StreamingDecoder decoder_;
  StopScanner scanner_;
  GeneratedText result_;
};

}  // namespace block_streamer::inline v1
