// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/plan/retention_model.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace block_streamer::inline v1 {

/// What a planner decided about a step, and what it expects of it.
struct ChosenRetention {
  Retention keep;
  StepCost cost;
};

namespace detail {

/// Searches a retention: few fetches first, then time, each with the fetches as even as possible.
class RetentionSearch {
 public:
  RetentionSearch(const VisitCycle& cycle, const PassCosts& costs, const SlotSpace& space,
                  std::uint32_t ahead)
      : cycle_{cycle}, costs_{costs}, model_{cycle, costs, space, ahead} {
    for (std::size_t i = 0; i < cycle.size(); ++i) {
      compute_s_ += costs.of(cycle.part(i)).compute_s;
      saved_.push_back(fetch_seconds(costs.of(cycle.part(i))));
    }
  }

  [[nodiscard]] std::optional<ChosenRetention> run() {
    const Retention nothing(cycle_.size(), 0);
    const auto start = score(nothing);
    if (!start) return std::nullopt;  // too few slots for anything
    Found best = improved({nothing, *start}, most_kept);
    // Fewer kept leaves more room to run ahead.
    const std::size_t fewest = kept(best.keep);
    for (std::size_t less = 1; less <= fewest && less <= most_less && !exhausted(); ++less) {
      if (storage_bound(best) || RetentionModel::equal(best.score.cost.seconds, compute_s_)) break;
      take_better(best, improved({nothing, *start}, fewest - less));
    }
    // Other beginnings, since an exchange of two does not lead everywhere.
    for (std::size_t every = 1; every <= most_strides && !exhausted(); ++every) {
      take_better(best, improved(every_kept({nothing, *start}, every), most_kept));
    }
    return ChosenRetention{std::move(best.keep), best.score.cost};
  }

 private:
  static constexpr std::size_t most_kept = ~std::size_t{0};
  static constexpr std::size_t most_evaluations = 20000;
  static constexpr std::size_t most_strides = 6;
  static constexpr std::size_t most_less = 8;

  struct Score {
    StepCost cost;
    double unevenness = 0;
  };
  struct Found {
    Retention keep;
    Score score;
  };

  [[nodiscard]] static std::size_t kept(const Retention& keep) {
    return static_cast<std::size_t>(std::count(keep.begin(), keep.end(), 1));
  }
  [[nodiscard]] static bool storage_bound(const Found& found) {
    return RetentionModel::equal(found.score.cost.seconds, found.score.cost.fetch_seconds);
  }
  /// Time, then fetches, then evenness.
  [[nodiscard]] static bool better(const Score& a, const Score& b) {
    if (!RetentionModel::equal(a.cost.seconds, b.cost.seconds))
      return a.cost.seconds < b.cost.seconds;
    if (a.cost.fetches != b.cost.fetches) return a.cost.fetches < b.cost.fetches;
    if (!RetentionModel::equal(a.cost.fetch_seconds, b.cost.fetch_seconds))
      return a.cost.fetch_seconds < b.cost.fetch_seconds;
    return a.unevenness < b.unevenness && !RetentionModel::equal(a.unevenness, b.unevenness);
  }

  [[nodiscard]] std::optional<Score> score(const Retention& keep) {
    ++evaluations_;
    const auto cost = model_.evaluate(keep);
    if (!cost) return std::nullopt;
    return Score{*cost, unevenness(keep)};
  }
  /// Least when each fetch has compute time to hide behind in proportion to its length.
  [[nodiscard]] double unevenness(const Retention& keep) const {
    double sum = 0, gap = 0, first = -1;
    double first_length = 1;
    for (std::size_t i = 0; i < cycle_.size(); ++i) {
      if (keep[cycle_.previous(i)] == 0) {
        if (first < 0) {
          first = gap;
          first_length = length(i);
        } else {
          sum += gap * gap / length(i);
        }
        gap = 0;
      }
      gap += costs_.of(cycle_.part(i)).compute_s + tiny;
    }
    return first < 0 ? 0 : sum + (gap + first) * (gap + first) / first_length;
  }
  [[nodiscard]] double length(std::size_t position) const { return saved_[position] + tiny; }

  [[nodiscard]] bool exhausted() const noexcept { return evaluations_ > most_evaluations; }
  static void take_better(Found& best, Found other) {
    if (better(other.score, best.score)) best = std::move(other);
  }

  /// Keeps every so many-th visit's part, as far as there is room.
  [[nodiscard]] Found every_kept(Found found, std::size_t every) {
    for (std::size_t i = 0; i < cycle_.size(); i += every) {
      found.keep[i] = 1;
      const auto with = score(found.keep);
      if (with) found.score = *with;
      found.keep[i] = with ? 1 : 0;
    }
    return found;
  }
  /// Keeps more, up to `limit`, then exchanges while that helps.
  [[nodiscard]] Found improved(Found found, std::size_t limit) {
    while (kept(found.keep) < limit && keep_one_more(found)) {
    }
    while (!exhausted() && exchange_round(found)) {
    }
    return found;
  }
  /// The visit whose part is the cheapest to keep: what it saves against how long it takes a slot.
  bool keep_one_more(Found& found) {
    std::optional<std::size_t> chosen;
    Score chosen_score;
    double chosen_price = 0;
    for (std::size_t i = 0; i < cycle_.size(); ++i) {
      if (found.keep[i] != 0) continue;
      const double price = static_cast<double>(cycle_.distance(i)) / (saved_[i] + tiny);
      if (chosen && price > chosen_price && !RetentionModel::equal(price, chosen_price)) continue;
      found.keep[i] = 1;
      const auto with = score(found.keep);
      found.keep[i] = 0;
      if (!with) continue;
      const bool cheaper = !chosen || !RetentionModel::equal(price, chosen_price);
      if (!cheaper && with->unevenness >= chosen_score.unevenness) continue;
      chosen = i;
      chosen_score = *with;
      chosen_price = price;
    }
    if (!chosen) return false;
    found.keep[*chosen] = 1;
    found.score = chosen_score;
    return true;
  }
  /// Frees one and keeps another, or only one of the two, wherever the step gets better by it, in
  /// rounds; goes on from where it was, so that a round costs one look at each pair.
  bool exchange_round(Found& found) {
    bool any = false;
    for (std::size_t out = 0; out <= cycle_.size(); ++out) {
      for (std::size_t in = 0; in <= cycle_.size() && !exhausted(); ++in) {
        const bool frees = out < cycle_.size(), keeps = in < cycle_.size();
        if ((frees && found.keep[out] == 0) || (keeps && found.keep[in] != 0)) continue;
        Retention& tried = trial_;
        tried = found.keep;
        if (frees) tried[out] = 0;
        if (keeps) tried[in] = 1;
        const auto with = score(tried);
        if (!with || !better(*with, found.score)) continue;
        found = {tried, *with};
        any = true;
      }
    }
    return any;
  }

  static constexpr double tiny = 1e-12;

  const VisitCycle& cycle_;
  const PassCosts& costs_;
  RetentionModel model_;
  std::vector<double> saved_;  ///< by position: the seconds of its part's fetch
  Retention trial_;
  double compute_s_ = 0;
  std::size_t evaluations_ = 0;
};

}  // namespace detail

/// @brief Which parts stay between their visits of a step that repeats: the least makespan in
/// steady state; among equally long ones the fewest fetches. A local search from the retention with
/// the fewest fetches, spread evenly; tests/plan compares it with brute force.
/// @returns nullopt if there are fewer than ahead + 1 slots that take every part.
/// **Cost.** At most 20,000 plays and a few more of the step (about 0.1 s for 100 visits);
/// a planner does it once per step that it has not met before.
[[nodiscard]] inline std::optional<ChosenRetention> choose_retention(const VisitCycle& cycle,
                                                                     const PassCosts& costs,
                                                                     const SlotSpace& space,
                                                                     std::uint32_t ahead) {
  return detail::RetentionSearch{cycle, costs, space, ahead}.run();
}

}  // namespace block_streamer::inline v1
