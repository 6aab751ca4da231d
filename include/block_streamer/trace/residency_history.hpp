// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/trace/residency_observer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The last transitions, for messages after a failure and for tests.
/// **Threads.** Externally synchronised: read it while no pass runs, or under the owner's mutex.
/// **Cost.** One allocation of `capacity` transitions when made; none afterwards.
class ResidencyHistory {
 public:
  static constexpr std::size_t capacity = 4096;

  ResidencyHistory() : ring_(capacity) {}

  /// @brief Adds one, over the oldest when full.
  void observe(const Transition& transition) noexcept {
    ring_[static_cast<std::size_t>(recorded_ % capacity)] = transition;
    ++recorded_;
  }
  /// @brief How many are kept: at most `capacity`.
  [[nodiscard]] std::size_t size() const noexcept {
    return static_cast<std::size_t>(std::min<std::uint64_t>(recorded_, capacity));
  }
  /// @brief How many were ever recorded.
  [[nodiscard]] std::uint64_t recorded() const noexcept { return recorded_; }
  /// @brief The index-th of those kept, the oldest first.
  /// @throws ContractViolation if index >= size().
  [[nodiscard]] const Transition& operator[](std::size_t index) const {
    expects(index < size(), "an index into the history must be below its size");
    return ring_[static_cast<std::size_t>((recorded_ - size() + index) % capacity)];
  }
  /// @brief Those kept, the oldest first. **Cost.** copies them.
  [[nodiscard]] std::vector<Transition> transitions() const {
    std::vector<Transition> kept;
    kept.reserve(size());
    for (std::size_t i = 0; i < size(); ++i) kept.push_back((*this)[i]);
    return kept;
  }
  void clear() noexcept { recorded_ = 0; }

 private:
  std::vector<Transition> ring_;
  std::uint64_t recorded_ = 0;
};
static_assert(residency_observer<ResidencyHistory>);

}  // namespace block_streamer::inline v1
