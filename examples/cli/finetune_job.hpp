// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "console.hpp"
#include "evaluate_job.hpp"
#include "finetune_record.hpp"
#include "finetune_rows.hpp"
#include "interrupt.hpp"
#include "jobs.hpp"
#include "run_saving.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/row_order.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/optim/schedule.hpp>
#include <block_streamer/text/text_row.hpp>

#include <ATen/Context.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// @brief One finetune: data, steps, and what is saved of them.
/// @tparam Training  what trains of the loaded model: AdapterTraining or FullTraining.
template <class Training>
class FinetuneRun {
 public:
  using Loaded = typename Training::Loaded;

  FinetuneRun(Loaded& loaded, const FinetuneJob& job)
      : loaded_{loaded},
        job_{job},
        data_{job, loaded.model().config()},
        order_{rows().size(), job.options.seed,
               job.options.shuffle ? block_streamer::RowShuffle::by_seed
                                   : block_streamer::RowShuffle::none},
        rows_a_step_{
            std::min<std::size_t>(job.options.batch * job.options.grad_accum, rows().size())},
        steps_{job.options.steps.value_or(job.options.epochs.value_or(1) * steps_an_epoch())} {
    const std::string fault = warmup_fault(job.options, steps_);
    if (!fault.empty()) throw block_streamer::Error{fault};
  }

  [[nodiscard]] FinetuneReport run() {
    const Training training{loaded_, job_.options};
    auto record = finetune_record(job_.options, loaded_.model(), rows(), steps_);
    training.add_to(record);
    RunSaving saving{job_.options, training.product(), std::move(record)};
    training.forecast(rows(), rows_a_step_);
    Loop loop{loaded_.model(), loaded_.streamer(), training_options(training),
              training.residents()};
    if (job_.options.graph) loop.record_steps();
    if (job_.options.resume) position_ = saving.resume(loop.optimizer());
    if (position_.step >= steps_) return already_finished(saving);
    say_what_trains(training);
    data_.tell();
    const std::string unit = job_.options.pack ? "pack" : "row";
    say(counted(rows().size(), unit) + ", " + counted(steps_, "step") + " of " +
        counted(rows_a_step_, unit));
    if (job_.options.resume) say_where_it_resumes();
    if (position_.step == 0) evaluate("before", saving);
    if (!interrupted()) train_or_tell(loop, saving);
    report_.interrupted = interrupted();
    finish(loop, saving);
    return report_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Loop =
      block_streamer::TrainingLoop<block_streamer::models::DecoderModel, typename Loaded::Streamer>;

  [[nodiscard]] std::span<const block_streamer::TextRow> rows() const { return data_.training(); }
  [[nodiscard]] std::uint64_t steps_an_epoch() const {
    return (rows().size() + rows_a_step_ - 1) / rows_a_step_;
  }
  void say_what_trains(const Training& training) const {
    const std::uint64_t trainable = training.parameter_count();
    std::uint64_t all = training.added_count();
    for (const auto& tensor : loaded_.model().checkpoint().tensors()) {
      all += block_streamer::element_count(tensor.spec.shape).value_or(0);
    }
    say("trainable " + std::to_string(trainable) + " of " + std::to_string(all) + " parameters (" +
        readable_number(100.0 * static_cast<double>(trainable) / static_cast<double>(all), 4) +
        " %)");
  }

  /// A result, so to standard output: whoever waits for it sees it now.
  void evaluate(const std::string& when, RunSaving& saving) {
    if (data_.held_out().empty()) return;
    const auto evaluation = evaluate_with_progress(loaded_, data_.held_out(), "held-out row");
    if (interrupted()) return;  // a mean over some of the rows is not what was asked for
    saving.add_held_out(position_.step, evaluation.mean_loss);
    std::cout << "held-out loss " << when << ": " << readable_number(evaluation.mean_loss, 6)
              << " nats per token over " << counted(evaluation.scored, "token") << std::endl;
  }

  [[nodiscard]] block_streamer::TrainingOptions training_options(const Training& training) const {
    return {.adamw = {.weight_decay = job_.options.weight_decay, .decay_vectors = false},
            .max_grad_norm = job_.options.max_grad_norm,
            .skip_non_finite = job_.options.skip_non_finite,
            .micro_batches = job_.options.micro_batches,
            .labels = training.labels()};
  }
  void say_where_it_resumes() const {
    if (position_.step == 0) {
      say("nothing is saved in " + job_.options.output.string() +
          " yet: the run starts from the beginning");
    } else {
      say("goes on after step " + std::to_string(position_.step));
    }
  }
  [[nodiscard]] FinetuneReport already_finished(RunSaving& saving) {
    const bool written = saving.complete();
    saving.tell_missing_metrics();
    say("the run in " + job_.options.output.string() + " is finished, after step " +
        std::to_string(position_.step) + (written ? ": wrote the rest of its files" : "") +
        (job_.options.mode == FinetuneMode::lora
             ? "; a new run into another folder goes on from its adapter with --adapter"
             : ""));
    return report_;
  }

  /// What can be done after a run that diverged is known here alone.
  void train_or_tell(Loop& loop, RunSaving& saving) {
    try {
      train(loop, saving);
    } catch (const block_streamer::NotFiniteError& error) {
      throw block_streamer::Error{error.what() + std::string{"; "} + saving.what_stays() +
                                  ". A lower --lr or --max-grad-norm may help, in a new run" +
                                  (saving.holds_this_run()
                                       ? " with --overwrite; --resume goes on only with "
                                         "--skip-non-finite, which leaves such steps out"
                                       : "")};
    }
  }
  void train(Loop& loop, RunSaving& saving) {
    const block_streamer::Schedule schedule{job_.options.schedule, peak_rate(job_.options),
                                            job_.options.warmup_steps, steps_};
    saving.begin(position_, loop.optimizer());
    loop.set_steps(position_.step);
    order_.seek(position_.step * rows_a_step_);
    Progress progress{"step", steps_};
    evaluate_between(saving);  // a run that was killed may have missed it
    while (position_.step < steps_ && !interrupted()) {
      const block_streamer::Statistics before = loaded_.statistics();
      const auto begin = Clock::now();
      const std::uint64_t number = position_.step + 1;
      const double rate = block_streamer::learning_rate_at(schedule, number);
      seed_dropout(number);
      const auto done = loop.step(rows(), order_.take(rows_a_step_), job_.options.batch, rate,
                                  [] { return interrupted(); });
      if (!done) break;
      position_.step = number;
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      count(*done, seconds, before);
      saving.add({number, done->loss, rate, done->tokens, done->gradient_norm, seconds,
                  !done->not_finite.empty()},
                 loop.optimizer());
      if (number == steps_) break;  // said and saved below
      if (saving.is_due(number)) saving.save(position_, loop.optimizer());
      evaluate_between(saving);
      progress.update(number, detail());
    }
    progress.finish();
  }
  /// After a step that is neither the first's beginning nor the last, where that is asked for.
  void evaluate_between(RunSaving& saving) {
    const std::uint64_t step = position_.step;
    const auto& every = job_.options.eval_every;
    if (!every || step == 0 || step % *every != 0 || saving.knows_held_out(step)) return;
    evaluate("after step " + std::to_string(step), saving);
  }
  void seed_dropout(std::uint64_t step) const {
    at::Generator generator = at::globalContext().defaultGenerator(loaded_.model().device());
    const std::lock_guard lock{generator.mutex()};
    generator.set_current_seed(block_streamer::step_seed(job_.options.seed, step));
  }
  void count(const block_streamer::StepReport& done, double seconds,
             const block_streamer::Statistics& before) {
    ++report_.steps;
    report_.seconds += seconds;
    report_.tokens += done.tokens;
    const block_streamer::Statistics now = loaded_.statistics();
    report_.bytes_needed += now.bytes_needed - before.bytes_needed;
    report_.bytes_read += now.bytes_read - before.bytes_read;
    last_loss_ = done.not_finite.empty() ? std::optional{done.loss} : std::nullopt;
    skipped_at_last_ = last_loss_ ? 0 : skipped_at_last_ + 1;
    if (last_loss_) return;
    ++position_.skipped;
    say("step " + std::to_string(position_.step) + " is skipped: " + done.not_finite);
  }

  void finish(Loop& loop, RunSaving& saving) {
    if (report_.steps == 0) {
      say("no step was finished: " + saving.what_stays());
      return;
    }
    if (position_.skipped == position_.step) {
      throw block_streamer::Error{
          "all " + counted(position_.step, "step") +
          " were skipped: nothing was trained; a new run in this folder needs "
          "--overwrite"};
    }
    say("step " + std::to_string(position_.step) + ", " + detail());
    if (position_.skipped > 0) say(counted(position_.skipped, "step") + " skipped");
    if (skipped_at_last_ > 0) {
      say("warning: skipped up to the last step, " + counted(skipped_at_last_, "step") +
          " in a row: what is saved may give no finite loss any more");
    }
    saving.save(position_, loop.optimizer());
    say(saving.product().name() + " saved in " + job_.options.output.string() +
        (report_.interrupted
             ? " after step " + std::to_string(position_.step) + "; --resume goes on from there"
             : std::string{}));
    if (!report_.interrupted) evaluate("after", saving);
    saving.draw();
    report_.interrupted = interrupted();  // the last evaluation may have been cut short
  }
  [[nodiscard]] std::string detail() const {
    const auto per_second = [this](double count, int digits) {
      return readable_number(count / report_.seconds, digits);
    };
    return (last_loss_ ? "loss " + readable_number(*last_loss_, 4) : std::string{"skipped"}) +
           ", " + per_second(static_cast<double>(report_.tokens), 1) + " tokens/s, " +
           per_second(static_cast<double>(report_.bytes_needed) / 1e9, 2) + " GB/s";
  }

  Loaded& loaded_;
  const FinetuneJob& job_;
  FinetuneRows data_;
  block_streamer::RowOrder order_;
  std::size_t rows_a_step_;
  std::uint64_t steps_;
  block_streamer::RunPosition position_;
  std::optional<double> last_loss_;    ///< of the last step; nullopt: it was skipped
  std::uint64_t skipped_at_last_ = 0;  ///< in a row, up to the last step
  FinetuneReport report_;
};

/// @brief Trains what `Training` says of the loaded model, and saves it.
template <class Training>
[[nodiscard]] FinetuneReport run_finetune(typename Training::Loaded& loaded,
                                          const FinetuneJob& job) {
  return FinetuneRun<Training>{loaded, job}.run();
}

}  // namespace block_streamer_cli
