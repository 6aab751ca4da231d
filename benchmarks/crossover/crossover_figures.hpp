// SPDX-License-Identifier: Apache-2.0
// What is said of one cell of the grid, and of a row of them.
#pragma once

#include "../support/report.hpp"

#include <block_streamer/core/block_image.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/plan/visit_order.hpp>
#include <block_streamer/simulation/makespan_bound.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace block_streamer_benchmarks {

namespace bs = block_streamer;

/// How a pass over the six blocks is done.
enum class CrossoverMode : std::size_t {
  resident_eager,
  resident_captured,
  transfer,
  transfer_captured,
  streamed_eager,
  streamed_graph,
};
inline constexpr std::array<const char*, 6> crossover_mode_names{
    "resident_eager",    "resident_captured", "transfer",
    "transfer_captured", "streamed_eager",    "streamed_graph"};
[[nodiscard]] constexpr bool needs_graph(CrossoverMode mode) noexcept {
  return mode == CrossoverMode::resident_captured || mode == CrossoverMode::transfer_captured ||
         mode == CrossoverMode::streamed_graph;
}

/// Times of one mode, in seconds; all zero where it did not run.
struct CrossoverTimes {
  double median_s = 0, mean_s = 0, variance_s2 = 0, least_s = 0, most_s = 0;

  CrossoverTimes() = default;
  /// @param runs  not empty. The variance is that of these runs.
  explicit CrossoverTimes(const std::vector<double>& runs) : median_s{median(runs)} {
    for (const double run : runs) mean_s += run / static_cast<double>(runs.size());
    for (const double run : runs)
      variance_s2 += (run - mean_s) * (run - mean_s) / static_cast<double>(runs.size());
    least_s = *std::min_element(runs.begin(), runs.end());
    most_s = *std::max_element(runs.begin(), runs.end());
  }
};

/// One cell: a width and a number of tokens.
struct CrossoverCell {
  std::int64_t width = 0;
  std::int64_t tokens = 0;
  std::array<CrossoverTimes, crossover_mode_names.size()> times;
  std::array<std::uint64_t, crossover_mode_names.size()> peak_bytes{};
  std::uint64_t increment_bytes = 0;  ///< activations and workspaces, weights resident
  std::vector<std::uint64_t> block_bytes;
  double recurrence_s = 0;        ///< of the eager pass
  double graph_recurrence_s = 0;  ///< of the replayed one; 0 without graphs
  bool graphs = false;

  [[nodiscard]] double median_s(CrossoverMode mode) const {
    return times[static_cast<std::size_t>(mode)].median_s;
  }
  [[nodiscard]] double total_bytes() const {
    double total = 0;
    for (const std::uint64_t bytes : block_bytes) total += static_cast<double>(bytes);
    return total;
  }
  /// @brief The time of the smallest block's copy, as its share of all.
  [[nodiscard]] double one_copy_s(CrossoverMode transfer) const {
    const auto least = *std::min_element(block_bytes.begin(), block_bytes.end());
    return median_s(transfer) * static_cast<double>(least) / total_bytes();
  }
  /// @brief 1: the transfer is hidden; 0: nothing of it. Not clamped.
  [[nodiscard]] double overlap(CrossoverMode streamed, CrossoverMode resident,
                               CrossoverMode transfer) const {
    return 1 - (median_s(streamed) - median_s(resident)) / median_s(transfer);
  }
  [[nodiscard]] double eager_overlap() const {
    return overlap(CrossoverMode::streamed_eager, CrossoverMode::resident_eager,
                   CrossoverMode::transfer);
  }
  [[nodiscard]] double graph_overlap() const {
    return overlap(CrossoverMode::streamed_graph, CrossoverMode::resident_captured,
                   CrossoverMode::transfer_captured);
  }
  /// @brief The host takes most of the time of a resident pass to launch its kernels.
  [[nodiscard]] bool launch_bound() const {
    return graphs && median_s(CrossoverMode::resident_captured) <=
                         0.4 * median_s(CrossoverMode::resident_eager);
  }
  /// @brief Of passes without the host's time where that is known.
  [[nodiscard]] bool compute_bound() const {
    return graphs ? median_s(CrossoverMode::resident_captured) >
                        median_s(CrossoverMode::transfer_captured)
                  : median_s(CrossoverMode::resident_eager) > median_s(CrossoverMode::transfer);
  }
  [[nodiscard]] std::string regime() const {
    const std::string device = compute_bound() ? "compute-bound" : "transfer-bound";
    return launch_bound() ? "launch-bound eagerly, " + device + " replayed" : device;
  }
};

/// @brief The least time of a streamed pass: a link that copies a block at a time and a device that
/// computes one, prefetch_ahead + 1 slots, nothing resident before; the measured times of all
/// copies and of the resident pass are shared out by the blocks' bytes, as these blocks compute in
/// proportion to them.
/// @param copies  of each block.
[[nodiscard]] inline double recurrence_of(const CrossoverCell& cell, CrossoverMode resident,
                                          CrossoverMode transfer,
                                          const std::vector<bs::ReadPlan>& copies,
                                          std::uint32_t slots) {
  const auto nanoseconds = [](double seconds) {
    return bs::Nanoseconds{std::llround(seconds * 1e9)};
  };
  bs::PassWork pass;
  pass.plan = bs::plan_pass(bs::ascending(0, copies.size()), {}, bs::SlotContents(slots),
                            {.prefetch_ahead = slots - 1, .prefetch_next_pass = false});
  for (const std::uint64_t bytes : cell.block_bytes) {
    pass.compute.push_back(
        nanoseconds(cell.median_s(resident) * static_cast<double>(bytes) / cell.total_bytes()));
  }
  bs::MakespanModel model;
  model.mode = bs::FetchMode::addressed;
  model.slot_count = slots;
  model.copy.bytes_per_s = static_cast<std::uint64_t>(cell.total_bytes() / cell.median_s(transfer));
  model.one_tenant = false;
  model.pass_fork = false;
  const auto end =
      bs::makespan_bound(model, {&pass, 1}, [&](bs::PartId part) -> const bs::ReadPlan& {
        return copies[bs::index_of(part.block)];
      }).end;
  return static_cast<double>(end.count()) * 1e-9;
}

/// @brief Between which widths computing takes over from copying, for cells of one number of
/// tokens with ascending widths.
[[nodiscard]] inline std::string crossover_sentence(const std::vector<CrossoverCell>& cells) {
  if (cells.empty()) return {};
  std::string text = "At " + std::to_string(cells.front().tokens) + " tokens ";
  std::string changes;
  for (std::size_t i = 1; i < cells.size(); ++i) {
    if (cells[i].compute_bound() == cells[i - 1].compute_bound()) continue;
    changes += (changes.empty() ? "" : " and ") + std::string{"between widths "} +
               std::to_string(cells[i - 1].width) + " and " + std::to_string(cells[i].width);
  }
  if (!changes.empty())
    return text + "the crossover of computing and copying lies " + changes + ".";
  return text +
         (cells.front().compute_bound() ? "computing takes longer than copying"
                                        : "copying takes longer than computing") +
         " at every width measured: no crossover.";
}

}  // namespace block_streamer_benchmarks
