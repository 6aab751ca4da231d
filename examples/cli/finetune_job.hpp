// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "adapter_agreement.hpp"
#include "console.hpp"
#include "evaluate_job.hpp"
#include "interrupt.hpp"
#include "jobs.hpp"
#include "loaded_model.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/row_order.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/text/text_dataset.hpp>

#include <ATen/Context.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// @brief One finetune: data, adapter, steps, and the adapter's files at the end.
template <class Backend>
class FinetuneRun {
 public:
  FinetuneRun(LoadedModel<Backend>& loaded, const FinetuneJob& job)
      : loaded_{loaded},
        job_{job},
        data_{open_rows(job.options.data, job.tokenizer, job.chat_template, job.options.seq_len,
                        loaded.model().config(),
                        /*keep_short_window=*/false)},
        order_{data_.rows().size(), job.options.seed},
        rows_a_step_{
            std::min<std::size_t>(job.options.batch * job.options.grad_accum, data_.rows().size())},
        steps_{job.options.steps.value_or(job.options.epochs.value_or(1) * steps_an_epoch())} {}

  [[nodiscard]] FinetuneReport run() {
    at::Generator generator = at::globalContext().defaultGenerator(loaded_.model().device());
    generator.set_current_seed(job_.options.seed);  // of dropout
    if (loaded_.adapter()) {
      expect_agreement(job_.options, *loaded_.adapter(), loaded_.lora_blocks());
    } else {
      loaded_.attach(new_adapter());
    }
    say_what_trains();
    say(counted(data_.rows().size(), "row") + ", " + counted(steps_, "step") + " of " +
        counted(rows_a_step_, "row"));
    evaluate("before");
    train();
    if (report_.steps == 0) {
      say("no step was finished: nothing is saved");
      return report_;
    }
    expect_finite();
    block_streamer::save_adapter(job_.options.output, *loaded_.adapter(),
                                 loaded_.model().checkpoint().folder().string());
    say("adapter saved in " + job_.options.output.string() +
        (report_.interrupted ? " after step " + std::to_string(report_.steps) : std::string{}));
    if (!report_.interrupted) evaluate("after");
    report_.interrupted = interrupted();  // the last evaluation may have been cut short
    return report_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] std::uint64_t steps_an_epoch() const {
    return (data_.rows().size() + rows_a_step_ - 1) / rows_a_step_;
  }
  [[nodiscard]] block_streamer::LoraAdapter new_adapter() const {
    const AdapterOptions& wanted = job_.options.adapter_options;
    block_streamer::LoraOptions lora;
    lora.rank = wanted.rank.value_or(lora.rank);
    lora.alpha = wanted.alpha.value_or(lora.alpha);
    lora.dropout = wanted.dropout.value_or(lora.dropout);
    if (!wanted.targets.empty()) lora.targets = wanted.targets;
    lora.top_fraction = wanted.top_fraction.value_or(lora.top_fraction);
    lora.seed = job_.options.seed;
    return block_streamer::make_lora_adapter(loaded_.lora_blocks(), lora, loaded_.model().device());
  }
  void say_what_trains() const {
    const std::uint64_t trainable = loaded_.adapter()->parameter_count();
    std::uint64_t all = trainable;
    for (const auto& tensor : loaded_.model().checkpoint().tensors()) {
      all += block_streamer::element_count(tensor.spec.shape).value_or(0);
    }
    say("trainable " + std::to_string(trainable) + " of " + std::to_string(all) + " parameters (" +
        readable_number(100.0 * static_cast<double>(trainable) / static_cast<double>(all), 4) +
        " %)");
  }

  void evaluate(const std::string& when) {
    if (job_.options.eval_data.empty()) return;
    const auto data =
        open_rows(job_.options.eval_data, job_.tokenizer, job_.chat_template, job_.options.seq_len,
                  loaded_.model().config(), /*keep_short_window=*/true);
    const auto evaluation = evaluate_with_progress(loaded_, data, "held-out row");
    if (interrupted()) return;  // a mean over some of the rows is not what was asked for
    say("held-out loss " + when + ": " + readable_number(evaluation.mean_loss, 4) +
        " nats per token over " + counted(evaluation.scored, "token"));
  }

  /// A last step may have spoilt the adapter without a loss that shows it.
  void expect_finite() const {
    for (const auto& [name, tensor] : loaded_.adapter()->named_parameters()) {
      if (at::isfinite(tensor).all().template item<bool>()) continue;
      throw block_streamer::Error{"after step " + std::to_string(report_.steps) + " " + name +
                                  " is not finite: nothing is saved; try a lower --lr"};
    }
  }

  void train() {
    block_streamer::TrainingLoop loop{loaded_.model(), loaded_.streamer()};
    Progress progress{"step", steps_};
    const auto begin = Clock::now();
    const block_streamer::Statistics before = loaded_.statistics();
    while (report_.steps < steps_ && !report_.interrupted) {
      const auto done = loop.step(data_.rows(), order_.take(rows_a_step_), job_.options.batch,
                                  job_.options.learning_rate, [] { return interrupted(); });
      if (!done) {
        report_.interrupted = true;
        break;
      }
      ++report_.steps;
      report_.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      const block_streamer::Statistics now = loaded_.statistics();
      report_.bytes_needed = now.bytes_needed - before.bytes_needed;
      report_.bytes_read = now.bytes_read - before.bytes_read;
      report_.tokens += done->tokens;
      last_loss_ = done->loss;
      if (report_.steps == steps_) break;  // said below
      progress.update(report_.steps, detail());
    }
    progress.finish();
    if (report_.steps == 0) return;
    say("step " + std::to_string(report_.steps) + ", " + detail());
  }
  [[nodiscard]] std::string detail() const {
    const auto per_second = [this](double count, int digits) {
      return readable_number(count / report_.seconds, digits);
    };
    return "loss " + readable_number(last_loss_, 4) + ", " +
           per_second(static_cast<double>(report_.tokens), 1) + " tokens/s, " +
           per_second(static_cast<double>(report_.bytes_needed) / 1e9, 2) + " GB/s";
  }

  LoadedModel<Backend>& loaded_;
  const FinetuneJob& job_;
  block_streamer::TextDataset data_;
  block_streamer::RowOrder order_;
  std::size_t rows_a_step_;
  std::uint64_t steps_;
  double last_loss_ = 0;
  FinetuneReport report_;
};

/// @brief Trains the adapter that is woven in, or a new one, and saves it.
template <class Backend>
[[nodiscard]] FinetuneReport run_finetune(LoadedModel<Backend>& loaded, const FinetuneJob& job) {
  return FinetuneRun<Backend>{loaded, job}.run();
}

}  // namespace block_streamer_cli
