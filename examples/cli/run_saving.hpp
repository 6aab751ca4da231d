// SPDX-License-Identifier: Apache-2.0
// What a finetune keeps on disk while it runs, and how it goes on from there.
#pragma once

#include "console.hpp"
#include "jobs.hpp"
#include "run_product.hpp"
#include "saved_state.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/loss_plot.hpp>
#include <block_streamer/finetune/metrics_log.hpp>
#include <block_streamer/finetune/run_folder.hpp>
#include <block_streamer/finetune/save_schedule.hpp>
#include <block_streamer/finetune/training_state.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <ATen/ops/isfinite.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace block_streamer_cli {

/// @brief The files of one run. The state is the truth: the product's files and the plot are made
/// from what it holds, after it.
class RunSaving {
 public:
  using Clock = block_streamer::SaveSchedule::Clock;
  static constexpr std::chrono::minutes interval{10};

  RunSaving(const FinetuneOptions& options, std::unique_ptr<RunProduct> product,
            block_streamer::RunRecord record)
      : folder_{options.output},
        replaces_{options.overwrite && !folder_.is_free()},
        product_{std::move(product)},
        record_{std::move(record)},
        schedule_{options.save_every, interval, Clock::now()} {}

  /// @brief Takes up the run that is there, if one is to be resumed.
  /// @returns where it stands; step 0: nothing is saved yet.
  /// @throws Error naming what the run there was begun with otherwise.
  [[nodiscard]] block_streamer::RunPosition resume(block_streamer::AdamW& optimizer) {
    const auto saved =
        with_a_way_out([&] { return block_streamer::read_saved_run(folder_.state()); });
    if (!saved) return {};
    block_streamer::expect_same_run(folder_.path().string(), record_, saved->record);
    if (saved->position.step > 0) {
      with_a_way_out([&] {
        block_streamer::load_training_state(folder_.state(), product_->parameters(), optimizer);
      });
      product_->took_up();
    }
    saved_step_ = saved->position.step;
    return saved->position;
  }

  /// @brief Before the first step: from now on the folder is this run's, unless it replaces an
  /// earlier one, which stays whole until a step has worked.
  /// @throws StorageError if the folder cannot be this run's.
  void begin(const block_streamer::RunPosition& position, const block_streamer::AdamW& optimizer) {
    block_streamer::MetricsLog::expect_usable(folder_.metrics());
    expect_room();
    if (!replaces_) take_folder(position, optimizer);
    schedule_.saved(Clock::now());
  }
  /// @brief Tells of a finished step. @pre begun.
  void add(const block_streamer::StepMetrics& step, const block_streamer::AdamW& optimizer) {
    if (!metrics_) take_folder({}, optimizer);
    metrics_->add(step);
  }

  /// @brief Tells of the loss on held-out rows after `step`.
  void add_held_out(std::uint64_t step, double loss) {
    if (metrics_) return metrics_->add_held_out(step, loss);
    before_ = loss;  // the folder is not this run's yet
  }
  /// @brief Whether it was told of this step, also before the run was resumed. @pre begun.
  [[nodiscard]] bool knows_held_out(std::uint64_t step) const {
    return metrics_ && !metrics_->held_out().empty() && metrics_->held_out().back().first >= step;
  }

  [[nodiscard]] bool is_due(std::uint64_t step) const {
    return schedule_.is_due(step, Clock::now());
  }
  /// @brief Saves state, product and plot, unless this step is saved already.
  /// @throws StorageError: what was saved last is whole then. Error if a parameter is not finite.
  void save(const block_streamer::RunPosition& position, const block_streamer::AdamW& optimizer) {
    if (position.step == saved_step_) return;
    expect_finite(position.step);
    block_streamer::save_training_state(folder_.state(), record_, position, product_->parameters(),
                                        optimizer);
    saved_step_ = position.step;
    product_->save(folder_.path());
    draw();
    schedule_.saved(Clock::now());
  }
  /// @brief Writes the plot of what is told so far. @pre begun, or complete().
  void draw() const {
    block_streamer::atomic_replace(folder_.plot(), std::string_view{block_streamer::loss_plot(
                                                       metrics_->losses(), metrics_->held_out())});
  }
  [[nodiscard]] const RunProduct& product() const noexcept { return *product_; }
  /// @brief True once the folder is this run's, and not one that it was to replace.
  [[nodiscard]] bool holds_this_run() const noexcept { return metrics_.has_value(); }
  /// @brief What lies in the folder if the run ends now, without another save.
  [[nodiscard]] std::string what_stays() const {
    if (replaces_ && !metrics_) {
      return "what was in " + folder_.path().string() + " before is still there, whole";
    }
    if (saved_step_ == 0) return "nothing is saved";
    return "what was saved after step " + std::to_string(saved_step_) + " stays";
  }
  /// @brief Of a finished run: says of how many steps the lines are lost.
  void tell_missing_metrics() {
    if (!metrics_) open_metrics(saved_step_);
  }
  /// @brief Of a finished run: writes what a kill between state and adapter left undone.
  /// @returns true if something was missing.
  bool complete() {
    if (product_->is_in(folder_.path()) && std::filesystem::exists(folder_.plot())) return false;
    product_->save(folder_.path());
    open_metrics(saved_step_);
    draw();
    return true;
  }

 private:
  /// What is certain to fail at the end fails now. A system that does not say is believed.
  void expect_room() const {
    std::uint64_t needed = 0;
    for (const auto& [name, tensor] : product_->parameters())
      needed += 12 * static_cast<std::uint64_t>(tensor.numel());  // itself and two moments, fp32
    std::error_code error;
    const auto room = std::filesystem::space(folder_.path(), error);
    if (error || room.available >= needed) return;
    throw block_streamer::Error{folder_.path().string() + ": " + readable_bytes(room.available) +
                                " are free there, and the run's state alone takes " +
                                readable_bytes(needed) + "; name another --output"};
  }
  void take_folder(const block_streamer::RunPosition& position,
                   const block_streamer::AdamW& optimizer) {
    folder_.prepare();
    if (position.step == 0) {
      block_streamer::save_training_state(folder_.state(), record_, position, {}, optimizer);
    }
    open_metrics(position.step);
  }
  void open_metrics(std::uint64_t step) {
    metrics_.emplace(folder_.metrics(), step);
    if (step == 0 && before_) metrics_->add_held_out(0, *before_);
    if (metrics_->missing() == 0) return;
    say(folder_.metrics().string() + ": the lines of " + std::to_string(metrics_->missing()) +
        " of " + counted(step, "finished step") + " are missing or cannot be read");
  }
  /// A last step may have spoilt a parameter without a loss that shows it.
  void expect_finite(std::uint64_t step) const {
    for (const auto& [name, tensor] : product_->parameters()) {
      if (at::isfinite(tensor).all().item<bool>()) continue;
      throw block_streamer::Error{
          "after step " + std::to_string(step) + " " + name +
          " is not finite: it is not saved; try a lower --lr, in a new run with "
          "--overwrite"};
    }
  }

  block_streamer::RunFolder folder_;
  bool replaces_;  ///< an earlier run, or other files
  std::unique_ptr<RunProduct> product_;
  block_streamer::RunRecord record_;
  block_streamer::SaveSchedule schedule_;
  std::optional<block_streamer::MetricsLog> metrics_;
  std::optional<double> before_;  ///< loss on held-out rows before the first step
  std::uint64_t saved_step_ = 0;
};

}  // namespace block_streamer_cli
