// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/text_row.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Which rows share a pack: best fit decreasing (Johnson 1973, Near-optimal bin packing
/// algorithms): longest row first, each into the fullest pack that still takes it. At most 11/9 of
/// the fewest packs, plus one.
/// @param lengths  in tokens, each at most `capacity`.
/// @returns numbers of rows, ascending in a pack; packs in the order of their first row. A function
/// of the arguments alone. **Cost.** O(n log n).
[[nodiscard]] inline std::vector<std::vector<std::size_t>> pack_by_length(
    std::span<const std::size_t> lengths, std::size_t capacity) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<std::size_t>> packs;
  std::set<std::pair<std::size_t, std::size_t>> room;  // tokens left, number of the pack
  for (const std::size_t row : order) {
    expects(lengths[row] <= capacity, "a row fits into a pack");
    const auto found = room.lower_bound({lengths[row], 0});
    const bool fits = found != room.end();
    const std::size_t pack = fits ? found->second : packs.size();
    const std::size_t left = (fits ? found->first : capacity) - lengths[row];
    if (fits) {
      room.erase(found);
    } else {
      packs.emplace_back();
    }
    packs[pack].push_back(row);
    room.emplace(left, pack);
  }
  for (auto& pack : packs) std::sort(pack.begin(), pack.end());
  std::sort(packs.begin(), packs.end());
  return packs;
}

/// @brief Rows one behind the other in packs of at most `capacity` tokens. Their tokens do not see
/// each other, so the loss is that of the rows apart.
/// @param rows  none empty or longer than `capacity`, none packed already.
/// @returns rows whose `sequences` tell where each begins; none is lost, cut or doubled.
[[nodiscard]] inline std::vector<TextRow> pack_rows(std::span<const TextRow> rows,
                                                    std::size_t capacity) {
  std::vector<std::size_t> lengths;
  for (const TextRow& row : rows) {
    expects(!row.tokens.empty() && row.sequences.empty(), "a row that is packed is one sequence");
    lengths.push_back(row.tokens.size());
  }
  std::vector<TextRow> packed;
  for (const auto& pack : pack_by_length(lengths, capacity)) {
    TextRow& together = packed.emplace_back();
    for (const std::size_t n : pack) {
      const TextRow& row = rows[n];
      together.tokens.insert(together.tokens.end(), row.tokens.begin(), row.tokens.end());
      together.trained.insert(together.trained.end(), row.trained.begin(), row.trained.end());
      together.sequences.push_back(static_cast<std::uint32_t>(row.tokens.size()));
    }
  }
  return packed;
}

}  // namespace block_streamer::inline v1
