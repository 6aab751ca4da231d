// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Visits that repeat for ever: a step. Of all rotations the least one is held, so that each
/// pass of a step finds the same cycle whichever of them comes first.
class VisitCycle {
 public:
  /// @pre not empty.
  explicit VisitCycle(std::vector<PartId> visits) : visits_{std::move(visits)} {
    expects(!visits_.empty(), "a cycle has a visit");
    begin_ = least_rotation(visits_);
    std::rotate(visits_.begin(), visits_.begin() + static_cast<std::ptrdiff_t>(begin_),
                visits_.end());
    link();
  }

  /// @brief The step that a pass and what is expected to follow are part of; nullopt if they do
  /// not show one: the pass itself must be seen to come again.
  [[nodiscard]] static std::optional<VisitCycle> of(std::span<const PartId> order,
                                                    std::span<const PartId> hint) {
    if (order.empty()) return std::nullopt;
    std::vector<PartId> all{order.begin(), order.end()};
    all.insert(all.end(), hint.begin(), hint.end());
    for (std::size_t period = order.size(); period + order.size() <= all.size(); ++period) {
      if (std::equal(all.begin() + static_cast<std::ptrdiff_t>(period), all.end(), all.begin())) {
        all.resize(period);
        return VisitCycle{std::move(all)};
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] std::size_t size() const noexcept { return visits_.size(); }
  [[nodiscard]] PartId part(std::size_t position) const noexcept { return visits_[position]; }
  [[nodiscard]] std::span<const PartId> visits() const noexcept { return visits_; }
  /// @brief Where the `visit`-th visit of the list lies that the cycle was made of, or of what
  /// follows it.
  [[nodiscard]] std::size_t position(std::size_t visit) const noexcept {
    return (visit + size() - begin_) % size();
  }
  /// @brief The visit before this one to the same part, itself if there is no other.
  [[nodiscard]] std::size_t previous(std::size_t position) const noexcept {
    return previous_[position];
  }
  /// @brief From a visit to the next of the same part, in visits; at most size().
  [[nodiscard]] std::size_t distance(std::size_t position) const noexcept {
    return distance_[position];
  }
  /// @brief The last visit to `part` before `position`; nullopt if the cycle has none.
  [[nodiscard]] std::optional<std::size_t> last_before(std::size_t position, PartId part) const {
    for (std::size_t back = 1; back <= size(); ++back) {
      const std::size_t at = (position + size() - back) % size();
      if (visits_[at] == part) return at;
    }
    return std::nullopt;
  }

 private:
  static std::size_t least_rotation(const std::vector<PartId>& visits) {
    const std::size_t n = visits.size();
    std::size_t least = 0;
    for (std::size_t from = 1; from < n; ++from) {
      for (std::size_t i = 0; i < n; ++i) {
        const PartId a = visits[(from + i) % n], b = visits[(least + i) % n];
        if (a == b) continue;
        if (a < b) least = from;
        break;
      }
    }
    return least;
  }
  void link() {
    std::vector<std::size_t> by_part(size());
    for (std::size_t i = 0; i < size(); ++i) by_part[i] = i;
    std::stable_sort(by_part.begin(), by_part.end(),
                     [this](std::size_t a, std::size_t b) { return visits_[a] < visits_[b]; });
    previous_.resize(size());
    distance_.resize(size());
    for (std::size_t first = 0; first < size();) {
      std::size_t last = first;
      while (last + 1 < size() && visits_[by_part[last + 1]] == visits_[by_part[first]]) ++last;
      for (std::size_t i = first; i <= last; ++i) {
        const std::size_t at = by_part[i], next = by_part[i == last ? first : i + 1];
        previous_[next] = at;
        distance_[at] = next > at ? next - at : next + size() - at;
      }
      first = last + 1;
    }
  }

  std::vector<PartId> visits_;
  std::size_t begin_ = 0;  ///< of the held rotation, in the list that was given
  std::vector<std::size_t> previous_;
  std::vector<std::size_t> distance_;
};

}  // namespace block_streamer::inline v1
