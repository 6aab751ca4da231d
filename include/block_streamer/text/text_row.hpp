// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

/// One training or evaluation sequence, or several packed into one row.
struct TextRow {
  std::vector<std::int32_t> tokens;
  /// Of the same size: 1 where the token is a target, to be predicted from those before it. Never
  /// the first token.
  std::vector<std::uint8_t> trained;
  /// Lengths of the sequences that are packed into it, which do not see each other; empty: it is
  /// one. The first token of each is not trained.
  std::vector<std::uint32_t> sequences{};

  [[nodiscard]] std::size_t trained_count() const noexcept {
    return static_cast<std::size_t>(std::count(trained.begin(), trained.end(), 1));
  }
};

}  // namespace block_streamer::inline v1
