// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "console.hpp"
#include "evaluate_job.hpp"
#include "jobs.hpp"

#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/text/packing.hpp>
#include <block_streamer/text/row_split.hpp>
#include <block_streamer/text/text_dataset.hpp>
#include <block_streamer/text/text_row.hpp>

#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer_cli {

/// @brief The rows of a finetune, read before anything is trained, so that a fault in them ends the
/// run while nothing is lost.
class FinetuneRows {
 public:
  /// @throws as open_rows(); Error if none would be left to train on.
  FinetuneRows(const FinetuneJob& job, const block_streamer::ModelConfig& config)
      : options_{job.options} {
    const auto open = [&](const std::filesystem::path& path, bool keep_short_window, bool tell) {
      return open_rows(path, job.tokenizer, job.chat_template, options_.seq_len, config,
                       keep_short_window, tell)
          .take_rows();
    };
    training_ = open(options_.data, false, true);
    if (options_.eval_fraction) hold_out();
    unpacked_ = training_.size();
    if (options_.pack) training_ = block_streamer::pack_rows(training_, options_.seq_len);
    if (options_.eval_data.empty()) return;
    std::error_code ignored;
    const bool told = std::filesystem::equivalent(options_.eval_data, options_.data, ignored);
    held_out_ = open(options_.eval_data, true, !told);
  }

  /// @brief What steps are made of: rows, or packs of them.
  [[nodiscard]] std::span<const block_streamer::TextRow> training() const { return training_; }
  /// @brief What is measured on; empty: nothing was asked for.
  [[nodiscard]] std::span<const block_streamer::TextRow> held_out() const { return held_out_; }

  /// @brief Says how many were held out and how full the packs are.
  void tell() const {
    if (options_.eval_fraction) {
      say(counted(held_out_.size(), "row") + " of " + std::to_string(held_out_.size() + unpacked_) +
          " held out");
    }
    if (!options_.pack) return;
    double tokens = 0;
    for (const auto& row : training_) tokens += static_cast<double>(row.tokens.size());
    const double room =
        static_cast<double>(training_.size()) * static_cast<double>(options_.seq_len);
    say(counted(unpacked_, "row") + " packed into " + std::to_string(training_.size()) + ", " +
        readable_number(100 * tokens / room, 1) + " % full");
  }

 private:
  void hold_out() {
    if (training_.size() < 2) {
      throw block_streamer::Error{options_.data.string() + " has one row of --seq-len " +
                                  std::to_string(options_.seq_len) +
                                  ": with --eval-fraction none is left to train on"};
    }
    auto split =
        block_streamer::hold_out_rows(std::move(training_), *options_.eval_fraction, options_.seed);
    training_ = std::move(split.training);
    held_out_ = std::move(split.held_out);
  }

  const FinetuneOptions& options_;
  std::vector<block_streamer::TextRow> training_, held_out_;
  std::size_t unpacked_ = 0;  ///< rows that train
};

}  // namespace block_streamer_cli
