// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Watches text for stop texts, whichever way it is cut into pieces: a stop text may span
/// several. Holds back what may be the beginning of one; text before a stop text is passed on, the
/// stop text and what follows is not.
/// Of several that end in the same place the longest counts. **Threads.** One.
class StopScanner {
 public:
  /// @pre none is empty.
  explicit StopScanner(std::vector<std::string> stop_texts) : stops_{std::move(stop_texts)} {
    for (const std::string& stop : stops_) expects(!stop.empty(), "a stop text is not empty");
  }

  /// @brief Takes a piece and returns the text that is certain. Nothing after stopped().
  [[nodiscard]] std::string push(std::string_view piece) {
    if (stopped_) return {};
    std::string certain;
    for (const char c : piece) {
      held_ += c;
      if (const std::size_t size = stop_at_end(); size != 0) {
        stopped_ = true;
        certain.append(held_, 0, held_.size() - size);
        held_.clear();
        return certain;
      }
      const std::size_t kept = beginning_at_end();
      certain.append(held_, 0, held_.size() - kept);
      held_.erase(0, held_.size() - kept);
    }
    return certain;
  }

  /// @brief What was held back, when no more text comes.
  [[nodiscard]] std::string flush() { return std::exchange(held_, {}); }
  [[nodiscard]] bool stopped() const noexcept { return stopped_; }

 private:
  /// Length of the longest stop text that held_ ends with, or 0.
  [[nodiscard]] std::size_t stop_at_end() const {
    std::size_t longest = 0;
    for (const std::string& stop : stops_) {
      if (std::string_view{held_}.ends_with(stop)) longest = std::max(longest, stop.size());
    }
    return longest;
  }
  /// Length of the longest end of held_ that some stop text begins with.
  [[nodiscard]] std::size_t beginning_at_end() const {
    for (std::size_t size = held_.size(); size != 0; --size) {
      const std::string_view end = std::string_view{held_}.substr(held_.size() - size);
      const auto begins = [end](const std::string& stop) { return stop.starts_with(end); };
      if (std::any_of(stops_.begin(), stops_.end(), begins)) return size;
    }
    return 0;
  }

  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace block_streamer::inline v1
