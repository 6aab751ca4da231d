// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

namespace block_streamer::inline v1::testing {

/// A promise of a concept that its model did not keep.
struct Finding {
  std::string promise;  ///< what a model of the concept does
  std::string found;    ///< what this one did
};

/// Given each finding as it is made, on the thread that runs the suite; may throw to end it.
using Report = std::function<void(const Finding&)>;

/// What a suite found in all.
struct Conformance {
  std::size_t promises = 0;  ///< looked at
  std::size_t broken = 0;
  explicit operator bool() const noexcept { return broken == 0; }
};

/// @brief Counts what a suite looks at and reports what does not hold. Knows no test framework.
/// **Threads.** One.
class Checks {
 public:
  explicit Checks(Report report) : report_{std::move(report)} {}

  /// @param found  text, or a function that makes it, asked only if `kept` is false.
  template <class Found>
  bool expect(bool kept, const char* promise, Found&& found) {
    ++result_.promises;
    if (kept) return true;
    ++result_.broken;
    if constexpr (std::is_invocable_v<Found&>) {
      if (report_) report_({promise, found()});
    } else {
      if (report_) report_({promise, std::forward<Found>(found)});
    }
    return false;
  }
  [[nodiscard]] const Conformance& result() const noexcept { return result_; }

 private:
  Report report_;
  Conformance result_;
};

}  // namespace block_streamer::inline v1::testing
