// SPDX-License-Identifier: Apache-2.0
// What every benchmark prints at its end: achieved, its limit as probed in the same process, and
// their ratio beside the bar.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

/// @pre not empty.
[[nodiscard]] inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// What a ratio must keep to.
struct Bar {
  enum class Kind { at_most, at_least };
  Kind kind;
  double value;
};
[[nodiscard]] inline Bar at_most(double value) {
  return {Bar::Kind::at_most, value};
}
[[nodiscard]] inline Bar at_least(double value) {
  return {Bar::Kind::at_least, value};
}

/// One line of the final table. Without a limit the ratio is meaningless and not printed.
struct Row {
  std::string what;
  double achieved = 0;
  std::string unit;
  std::optional<double> limit{};
  std::optional<double> ratio{};
  std::optional<Bar> bar{};
  std::string note{};
};

/// @brief Collects rows while benchmarks run; prints them at the end.
class Report {
 public:
  /// @brief Google Benchmark calls a benchmark again with more iterations: the last row counts.
  void add(Row row) {
    const auto same = std::find_if(rows_.begin(), rows_.end(),
                                   [&row](const Row& r) { return r.what == row.what; });
    if (same != rows_.end()) {
      *same = std::move(row);
    } else {
      rows_.push_back(std::move(row));
    }
  }
  /// @brief Adds the row, and its figures to the benchmark's counters, for --benchmark_out.
  void add(benchmark::State& state, Row row) {
    state.counters["achieved"] = row.achieved;
    if (row.limit) state.counters["limit"] = *row.limit;
    if (row.ratio) state.counters["ratio"] = *row.ratio;
    if (row.bar) state.counters["bar"] = row.bar->value;
    add(std::move(row));
  }
  void failed(const std::string& what, const std::string& why) {
    Row row;
    row.what = what;
    row.note = "FAILED: " + why.substr(0, why.find('\n'));
    add(std::move(row));
  }

  void print() const {
    std::printf("\n%-44s %12s %12s %8s %8s\n", "", "achieved", "limit", "ratio", "bar");
    for (const Row& row : rows_) {
      std::printf("%-44s %12s %12s %8s %8s %s\n", row.what.c_str(),
                  row.unit.empty() ? "" : (number(row.achieved) + " " + row.unit).c_str(),
                  row.limit ? number(*row.limit).c_str() : "",
                  row.ratio ? fixed(*row.ratio).c_str() : "", bar_of(row).c_str(),
                  (verdict_of(row) + row.note).c_str());
    }
    std::fflush(stdout);
  }

 private:
  static std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.5g", value);
    return text;
  }
  static std::string fixed(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4f", value);
    return text;
  }
  static std::string bar_of(const Row& row) {
    if (!row.bar) return {};
    return (row.bar->kind == Bar::Kind::at_most ? "<= " : ">= ") + number(row.bar->value);
  }
  /// The bar is about the ratio; about the figure itself where there is none.
  static std::string verdict_of(const Row& row) {
    if (!row.bar) return {};
    const double value = row.ratio.value_or(row.achieved);
    const bool met =
        row.bar->kind == Bar::Kind::at_most ? value <= row.bar->value : value >= row.bar->value;
    return met ? "ok " : "MISSED ";
  }

  std::vector<Row> rows_;
};

/// @brief Registers a benchmark that measures its own rounds, once. An exception is reported and
/// the next benchmark runs.
/// @param body  called with the state; sets its iteration time.
template <class Body>
void register_once(Report& report, const std::string& name, Body body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [&report, name, body](benchmark::State& state) {
                                 for ([[maybe_unused]] auto _ : state) {
                                   try {
                                     body(state);
                                   } catch (const std::exception& error) {
                                     report.failed(name, error.what());
                                     state.SkipWithError(error.what());
                                     break;
                                   }
                                 }
                               })
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

}  // namespace block_streamer_benchmarks
