// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::testing {

/// @brief Runs a program once for every sequence of choices that it can make:
/// ```
/// Choices choices;
/// do program(choices); while (choices.next());
/// ```
/// The program asks `choices(n)` for a number below n wherever it may go on in n ways, and must be
/// the same for the same answers. Given to a VirtualClock as its order, that is every order in
/// which events of equal time can happen.
/// **Threads.** One.
class Choices {
 public:
  /// @brief Which of `count` ways (at least one) to go.
  [[nodiscard]] std::size_t operator()(std::size_t count) {
    if (at_ == path_.size()) path_.push_back({0, count});
    return path_[at_++].taken;
  }
  /// @brief Goes back to the last choice that had another way, to take that in the next run; false
  /// if there is none left.
  [[nodiscard]] bool next() {
    at_ = 0;
    ++runs_;
    while (!path_.empty() && path_.back().taken + 1 == path_.back().count) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().taken;
    return true;
  }
  /// @brief Runs that were completed.
  [[nodiscard]] std::uint64_t runs() const noexcept { return runs_; }

 private:
  struct Choice {
    std::size_t taken, count;
  };
  std::vector<Choice> path_;
  std::size_t at_ = 0;
  std::uint64_t runs_ = 0;
};

}  // namespace block_streamer::inline v1::testing
