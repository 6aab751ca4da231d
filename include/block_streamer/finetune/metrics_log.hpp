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
#include <optional>
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

/// @brief One number of each of some steps, in their order.
using StepValues = std::vector<std::pair<std::uint64_t, double>>;

namespace detail {
/// null where JSON has none.
[[nodiscard]] inline std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  return number_text(value);
}

/// Step and value of a line that has this field; nullopt for another, and for what is no line, as a
/// killed run may leave at the end.
[[nodiscard]] inline std::optional<StepValues::value_type> value_of_line(const std::string& line,
                                                                         const char* field) {
  try {
    const auto object = parse_json(line, "a line of metrics");
    const auto step = object.find("step");
    const auto value = object.find(field);
    if (step == object.end() || value == object.end() || !step->is_number_unsigned()) return {};
    return StepValues::value_type{step->get<std::uint64_t>(),
                                  value->is_number() ? value->get<double>() : std::nan("")};
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

/// @brief The line of a loss on held-out rows after `step` (0: before the first).
[[nodiscard]] inline std::string held_out_line(std::uint64_t step, double loss) {
  return "{\"step\": " + std::to_string(step) +
         ", \"held_out_loss\": " + detail::json_number(loss) + "}\n";
}

/// @brief The log of a run: a line a step, written as soon as the step is done, and one for each
/// loss on held-out rows.
/// **Threads.** One.
class MetricsLog {
 public:
  /// @brief Goes on with the log of a run that was saved after `step` (0: begins anew): what later
  /// steps left is dropped, and what is no such line, as one that was cut short. A log that is
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
    write(metrics_line(step));
    losses_.emplace_back(step.step, step.loss);
  }
  /// @brief Of the model after `step`. @throws as add().
  void add_held_out(std::uint64_t step, double loss) {
    write(held_out_line(step, loss));
    held_out_.emplace_back(step, loss);
  }
  /// @brief Finished steps whose line was not there, or could not be read, when the log was opened.
  [[nodiscard]] std::uint64_t missing() const noexcept { return missing_; }
  /// @brief The loss of every step that has a line.
  [[nodiscard]] const StepValues& losses() const noexcept { return losses_; }
  /// @brief The losses on held-out rows.
  [[nodiscard]] const StepValues& held_out() const noexcept { return held_out_; }

 private:
  void write(const std::string& line) {
    out_ << line << std::flush;
    if (!out_) throw StorageError{path_.string(), "writing the step's line failed"};
  }
  [[nodiscard]] std::string lines_up_to(std::uint64_t step, const std::string& text) {
    std::string kept;
    for (std::size_t begin = 0; begin < text.size();) {
      // The last line may lack its newline: it counts if it is whole.
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      const std::string line = text.substr(begin, end - begin);
      if (take_up(line, step)) kept += line + "\n";
      begin = end + 1;
    }
    return kept;
  }
  /// @returns whether it is a line that comes next, of a step up to `last`.
  [[nodiscard]] bool take_up(const std::string& line, std::uint64_t last) {
    const std::uint64_t before = losses_.empty() ? 0 : losses_.back().first;
    if (const auto loss = detail::value_of_line(line, "loss")) {
      if (loss->first <= before || loss->first > last) return false;
      losses_.push_back(*loss);
      return true;
    }
    const auto held_out = detail::value_of_line(line, "held_out_loss");
    if (!held_out || held_out->first != before) return false;
    if (!held_out_.empty() && held_out_.back().first == before) return false;
    held_out_.push_back(*held_out);
    return true;
  }

  std::filesystem::path path_;
  StepValues losses_, held_out_;
  std::uint64_t missing_ = 0;
  std::ofstream out_;
};

}  // namespace block_streamer::inline v1
