// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/number_text.hpp>
#include <block_streamer/os/atomic_replace.hpp>
#include <block_streamer/text/json_document.hpp>
#include <block_streamer/text/text_file.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// One step of a run, as its log tells it.
struct StepMetrics {
  std::uint64_t step = 0;  ///< 1-based
  double loss = 0;         ///< nats per trained token of the step
  double learning_rate = 0;
  std::uint64_t tokens = 0;  ///< through the model in this step
  double grad_norm = 0;      ///< before it is clipped
  double seconds = 0;        ///< of this step
  bool skipped = false;      ///< not finite, and nothing was changed
};

namespace detail {
/// null where JSON has none.
[[nodiscard]] inline std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  return number_text(value);
}

/// The step and loss of one line; step 0 for a line that is none, as a killed run may leave at the
/// end.
[[nodiscard]] inline std::pair<std::uint64_t, double> step_and_loss(const std::string& line) {
  try {
    const auto object = parse_json(line, "a line of metrics");
    const auto step = object.find("step");
    const auto loss = object.find("loss");
    if (step == object.end() || loss == object.end() || !step->is_number_unsigned()) return {};
    return {step->get<std::uint64_t>(), loss->is_number() ? loss->get<double>() : std::nan("")};
  } catch (const FormatError&) {
    return {};
  }
}
}  // namespace detail

/// @brief One JSON object on one line, with its newline.
[[nodiscard]] inline std::string metrics_line(const StepMetrics& step) {
  std::string line = "{\"step\": " + std::to_string(step.step);
  line += ", \"loss\": " + detail::json_number(step.loss);
  line += ", \"learning_rate\": " + detail::json_number(step.learning_rate);
  line += ", \"tokens\": " + std::to_string(step.tokens);
  line += ", \"grad_norm\": " + (step.skipped ? "null" : detail::json_number(step.grad_norm));
  line += ", \"seconds\": " + detail::json_number(step.seconds);
  if (step.skipped) line += ", \"skipped\": true";
  return line + "}\n";
}

/// @brief The log of a run: a line a step, written as soon as the step is done.
/// **Threads.** One.
class MetricsLog {
 public:
  /// @brief Goes on with the log of a run that was saved after `step` (0: begins anew): what later
  /// steps left is dropped, and what is no line of a step, as one that was cut short. A log that is
  /// whole stays untouched.
  /// @throws StorageError naming the path, also if it is there and no regular file.
  MetricsLog(const std::filesystem::path& path, std::uint64_t step) : path_{path} {
    expect_usable(path_);
    std::error_code error;
    const bool goes_on = step > 0 && std::filesystem::exists(path, error);
    const std::string found = goes_on ? read_text_file(path_) : std::string{};
    const std::string kept = lines_up_to(step, found);
    if (!goes_on || kept != found) atomic_replace(path_, std::string_view{kept});
    out_.open(path_, std::ios::binary | std::ios::app);
    if (!out_) throw StorageError{path_.string(), "cannot be written"};
    missing_ = step - losses_.size();
  }
  /// @throws StorageError if something is there that is no regular file: a pipe would block whoever
  /// opens it.
  static void expect_usable(const std::filesystem::path& path) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status) || std::filesystem::is_regular_file(status)) return;
    throw StorageError{path.string(), "is no regular file; move it away"};
  }

  /// @throws StorageError if the line could not be written, e.g. because the disk is full.
  void add(const StepMetrics& step) {
    out_ << metrics_line(step) << std::flush;
    if (!out_) throw StorageError{path_.string(), "writing the step's line failed"};
    losses_.emplace_back(step.step, step.loss);
  }
  /// @brief Finished steps whose line was not there, or could not be read, when the log was opened.
  [[nodiscard]] std::uint64_t missing() const noexcept { return missing_; }
  /// @brief Step and loss of every line.
  [[nodiscard]] std::span<const std::pair<std::uint64_t, double>> losses() const noexcept {
    return losses_;
  }

 private:
  [[nodiscard]] std::string lines_up_to(std::uint64_t step, const std::string& text) {
    std::string kept;
    for (std::size_t begin = 0; begin < text.size();) {
      // The last line may lack its newline: it counts if it is whole.
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      const std::string line = text.substr(begin, end - begin);
      const auto entry = detail::step_and_loss(line);
      const std::uint64_t before = losses_.empty() ? 0 : losses_.back().first;
      if (entry.first > before && entry.first <= step) {
        kept += line + "\n";
        losses_.push_back(entry);
      }
      begin = end + 1;
    }
    return kept;
  }

  std::filesystem::path path_;
  std::vector<std::pair<std::uint64_t, double>> losses_;
  std::uint64_t missing_ = 0;
  std::ofstream out_;
};

}  // namespace block_streamer::inline v1
