// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/generate/generated_row.hpp>
#include <block_streamer/generate/generation.hpp>
#include <block_streamer/layers/kv_cache.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/non_finite.hpp>
#include <block_streamer/text/tokenizer.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Runs the blocks of a decoder: a Streamer, or anything that does the same.
/// - `forward(hidden, context)`: (B,T,C) to (B,T,C), appending to the context's KV cache.
template <class S>
concept decoder_runner = requires(S& runner, const at::Tensor& hidden,
                                  models::DecoderContext& context) {
  { runner.forward(hidden, context) } -> std::convertible_to<at::Tensor>;
};

/// A runner that can show what leaves each block, as Streamer::forward_observed() does.
template <class S>
concept observable_decoder_runner = decoder_runner<S> &&
    requires(S& runner, const at::Tensor& hidden, models::DecoderContext& context) {
  runner.forward_observed(hidden, context, [](BlockId, const at::Tensor&) {});
};

/// @brief Continues prompts: all of them are read in one pass, then every pass makes one token for
/// each row, with a KV cache. Prompts of unequal length are padded at the left and share all
/// passes, so what a pass fetches does not depend on how many there are; rows that ended stay until
/// the last one does.
/// @code
///   TextGenerator generator{model, streamer, tokenizer};
///   GenerationReport report = generator.generate(prompts, {.max_new_tokens = 64});
/// @endcode
/// **Threads.** One at a time. **Lifetime.** Model, runner and tokenizer outlive it.
/// **Cost.** Memory: the KV cache of longest prompt + new tokens, the hidden state of the prompts,
/// logits of one position a row. Rows of the embedding beyond the tokenizer's ids are padding and
/// never chosen.
template <decoder_runner Runner>
class TextGenerator {
 public:
  TextGenerator(const models::DecoderModel& model, Runner& runner, const Tokenizer& tokenizer)
      : model_{&model}, runner_{&runner}, tokenizer_{&tokenizer} {}

  /// @param prompts  ids, at least one a row.
  /// @throws Error naming the row if a prompt is empty or leaves no position for a new token, or if
  /// its logits are not finite: then with the first block whose output is not, if the runner can be
  /// observed; what the runner throws.
  [[nodiscard]] GenerationReport generate(std::span<const std::vector<std::int32_t>> prompts,
                                          const GenerationOptions& options,
                                          const GenerationObserver& observer = {}) {
    check(prompts, options);
    const c10::NoGradGuard no_grad;
    Batch batch{*model_, prompts, options};
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      batch.rows.emplace_back(*tokenizer_, options, i, prompts[i].size());
      batch.report.prompt_tokens += prompts[i].size();
    }
    at::Tensor ids = batch.prompt_ids();  // (B,T)
    const Clock::time_point started = Clock::now();
    Clock::time_point first_token = started;
    while (any_running(batch)) {
      if (observer.cancelled && observer.cancelled()) {
        finish_all(batch, FinishReason::cancelled, observer);
      } else if (ids.size(1) > batch.cache.capacity() - batch.cache.length()) {
        finish_all(batch, FinishReason::positions, observer);
      } else {
        ids = pass(batch, ids, options, observer);
        if (batch.report.passes == 1) first_token = Clock::now();
      }
    }
    batch.report.prefill_s = seconds(first_token - started);
    batch.report.decode_s = seconds(Clock::now() - first_token);
    for (GeneratedRow& row : batch.rows) batch.report.rows.push_back(row.take());
    return std::move(batch.report);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Batch {
    Batch(const models::DecoderModel& model, std::span<const std::vector<std::int32_t>> prompts,
          const GenerationOptions& options)
        : inputs{prompts},
          longest{longest_of(prompts)},
          cache{model.make_cache(static_cast<std::int64_t>(prompts.size()),
                                 capacity(longest, model, options))} {
      for (const auto& prompt : prompts) {
        padding.push_back(longest - static_cast<std::int64_t>(prompt.size()));
      }
    }

    static std::int64_t longest_of(std::span<const std::vector<std::int32_t>> prompts) {
      std::size_t longest = 0;
      for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
      return static_cast<std::int64_t>(longest);
    }
    /// The last new token is never fed again.
    static std::int64_t capacity(std::int64_t longest, const models::DecoderModel& model,
                                 const GenerationOptions& options) {
      const auto positions = static_cast<std::int64_t>(model.config().max_position);
      const auto wanted =
          std::min(options.max_new_tokens - 1, static_cast<std::uint64_t>(positions - longest));
      return longest + static_cast<std::int64_t>(wanted);
    }
    [[nodiscard]] at::Tensor prompt_ids() const {
      at::Tensor ids = at::empty({static_cast<std::int64_t>(inputs.size()), longest}, at::kLong);
      std::int64_t* out = ids.data_ptr<std::int64_t>();
      for (const auto& prompt : inputs) {
        out = std::fill_n(out, longest - static_cast<std::int64_t>(prompt.size()), std::int64_t{0});
        out = std::copy(prompt.begin(), prompt.end(), out);
      }
      return ids;
    }

    std::span<const std::vector<std::int32_t>> inputs;  ///< the prompts' ids, the caller's
    std::int64_t longest;
    std::vector<std::int64_t> padding;  ///< at the left of each row
    KvCache cache;
    std::vector<GeneratedRow> rows;
    GenerationReport report;
  };

  void check(std::span<const std::vector<std::int32_t>> prompts,
             const GenerationOptions& options) const {
    expects(!prompts.empty(), "there is a prompt");
    expects(options.max_new_tokens > 0 && options.chunk_tokens > 0,
            "max_new_tokens and chunk_tokens are positive");
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const std::string which = name_of_prompt(i, prompts.size());
      if (prompts[i].empty()) throw Error{which + " has no token to continue from"};
      if (prompts[i].size() > model_->config().max_position) {
        throw Error{which + " has " + std::to_string(prompts[i].size()) +
                    " tokens, the model's positions are " +
                    std::to_string(model_->config().max_position) +
                    " (max_position_embeddings in " + model_->config().path + ")"};
      }
    }
  }

  static std::string name_of_prompt(std::size_t index, std::size_t count) {
    return count == 1 ? "the prompt" : "prompt " + std::to_string(index + 1);
  }

  /// A token chosen from such logits would be meaningless, and so would all after it.
  void expect_finite(const Batch& batch, std::size_t row, std::span<const float> logits,
                     const GenerationOptions& options) const {
    if (std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) return;
    std::string what = name_of_prompt(row, batch.inputs.size()) + ", new token " +
                       std::to_string(batch.rows[row].result().ids.size() + 1) +
                       ": the logits are not finite";
    if constexpr (observable_decoder_runner<Runner>) {
      what += "; the first value that is not is in " + locate(batch, row, options);
    }
    throw Error{what};
  }
  /// Runs the row's text again, alone and from the start.
  [[nodiscard]] std::string locate(const Batch& batch, std::size_t row,
                                   const GenerationOptions& options) const {
    std::vector<std::int64_t> text{batch.inputs[row].begin(), batch.inputs[row].end()};
    const auto& made = batch.rows[row].result().ids;
    text.insert(text.end(), made.begin(), made.end());
    const at::Tensor ids = at::tensor(text, at::kLong).unsqueeze(0);  // (1,T)
    KvCache cache = model_->make_cache(1, ids.size(1));
    models::ContextOptions layout{&cache};
    layout.chunk_tokens = options.chunk_tokens;
    return first_non_finite(*model_, *runner_, ids, model_->context(ids, layout));
  }

  /// One pass over `ids` (B,T); returns the next ids (B,1).
  [[nodiscard]] at::Tensor pass(Batch& batch, const at::Tensor& ids,
                                const GenerationOptions& options,
                                const GenerationObserver& observer) {
    models::ContextOptions layout{&batch.cache, batch.padding};
    layout.chunk_tokens = std::max<std::int64_t>(1, options.chunk_tokens / ids.size(0));
    models::DecoderContext context = model_->context(ids, layout);
    const at::Tensor hidden = runner_->forward(model_->embed(ids), context);  // (B,T,C)
    const at::Tensor logits =
        model_->logits_last(hidden).to(at::kCPU, at::kFloat).contiguous();  // (B,V)
    ++batch.report.passes;
    at::Tensor next = at::empty({ids.size(0), 1}, at::kLong);
    std::int64_t* out = next.data_ptr<std::int64_t>();
    const auto width = static_cast<std::size_t>(logits.size(1));
    const std::size_t named = std::min(width, tokenizer_->vocabulary_size());
    for (std::size_t i = 0; i < batch.rows.size(); ++i) {
      GeneratedRow& row = batch.rows[i];
      if (row.running()) {
        const std::span<const float> of_row{logits.data_ptr<float>() + i * width, named};
        expect_finite(batch, i, of_row, options);
        tell(observer, i, row.step(of_row));
        ++batch.report.new_tokens;
      }
      out[i] = row.last_id();  // of a row that ended: any token will do
    }
    if (observer.pass) observer.pass(batch.report.new_tokens);
    return next;
  }

  static void tell(const GenerationObserver& observer, std::size_t row, const std::string& text) {
    if (observer.text && !text.empty()) observer.text(row, text);
  }
  static void finish_all(Batch& batch, FinishReason reason, const GenerationObserver& observer) {
    for (std::size_t i = 0; i < batch.rows.size(); ++i) {
      if (batch.rows[i].running()) tell(observer, i, batch.rows[i].finish(reason));
    }
  }
  static bool any_running(const Batch& batch) {
    return std::any_of(batch.rows.begin(), batch.rows.end(),
                       [](const GeneratedRow& row) { return row.running(); });
  }
  static double seconds(Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }

  const models::DecoderModel* model_;
  Runner* runner_;
  const Tokenizer* tokenizer_;
};

}  // namespace block_streamer::inline v1
