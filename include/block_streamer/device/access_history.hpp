// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/happens_before.hpp>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Bytes [begin, end) of the process's address space, host or device.
struct AddressRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  [[nodiscard]] bool contains(const AddressRange& other) const noexcept {
    return begin <= other.begin && other.end <= end;
  }
};

/// One operation's access, as remembered. `operation` has static storage duration.
struct AccessStamp {
  ActorId actor{};
  std::uint64_t time = 0;
  std::string_view operation;
  friend bool operator==(const AccessStamp& a, const AccessStamp& b) noexcept {
    return a.actor == b.actor && a.time == b.time && a.operation == b.operation;
  }
};

/// Two accesses to `range`, at least one a write, that nothing orders.
struct Race {
  AccessStamp earlier;
  AddressRange range;  ///< smallest one that holds all bytes the two share
};

/// @brief For every byte the last write and each actor's last read since. That suffices: an access
/// ordered after these is ordered after all that came before them.
/// **Cost.** Memory grows with the number of distinct borders in use, not with the number of
/// accesses: a write merges what it covers, and equal neighbours are merged.
class AccessHistory {
 public:
  /// @brief Remembers an access and @returns the earlier ones that conflict with it and did not
  /// happen before it, given what its actor knows (`clock`).
  std::vector<Race> access(const AccessStamp& stamp, const VectorClock& clock,
                           const AddressRange& range, Access kind) {
    std::vector<Race> races;
    if (range.begin >= range.end) return races;
    split(range.begin);
    split(range.end);
    for (auto cell = cells_.lower_bound(range.begin);
         cell != cells_.end() && cell->first < range.end; ++cell) {
      check(*cell, clock, kind, races);
    }
    if (kind == Access::write) {
      erase(range);
      cells_.emplace(range.begin, Cell{range.end, stamp, {}});
    } else {
      add_read(stamp, range);
    }
    merge(range);
    return races;
  }

  /// @brief The memory has a new owner: what happened to it before is not remembered.
  void forget(const AddressRange& range) {
    if (range.begin >= range.end) return;
    split(range.begin);
    split(range.end);
    erase(range);
  }

  [[nodiscard]] std::size_t cell_count() const noexcept { return cells_.size(); }

 private:
  struct Cell {
    std::uintptr_t end = 0;
    std::optional<AccessStamp> write;
    std::vector<AccessStamp> reads;  // one an actor
  };
  using Cells = std::map<std::uintptr_t, Cell>;

  static void check(const Cells::value_type& cell, const VectorClock& clock, Access kind,
                    std::vector<Race>& races) {
    const AddressRange range{cell.first, cell.second.end};
    if (cell.second.write) require_order(*cell.second.write, clock, range, races);
    if (kind == Access::read) return;
    for (const AccessStamp& read : cell.second.reads) require_order(read, clock, range, races);
  }

  static void require_order(const AccessStamp& earlier, const VectorClock& clock,
                            const AddressRange& range, std::vector<Race>& races) {
    if (clock[earlier.actor] >= earlier.time) return;
    const auto known = std::find_if(races.begin(), races.end(),
                                    [&](const Race& race) { return race.earlier == earlier; });
    if (known == races.end()) {
      races.push_back({earlier, range});
    } else {
      known->range.end = range.end;  // cells come in order of their addresses
    }
  }

  void add_read(const AccessStamp& stamp, const AddressRange& range) {
    std::uintptr_t at = range.begin;
    while (at < range.end) {
      auto cell = cells_.lower_bound(at);
      if (cell == cells_.end() || cell->first > at) {
        const std::uintptr_t next =
            cell == cells_.end() ? range.end : std::min(cell->first, range.end);
        cell = cells_.emplace_hint(cell, at, Cell{next, {}, {}});
      }
      auto& reads = cell->second.reads;
      std::erase_if(reads, [&](const AccessStamp& read) { return read.actor == stamp.actor; });
      reads.push_back(stamp);
      at = cell->second.end;
    }
  }

  void split(std::uintptr_t at) {
    const auto next = cells_.lower_bound(at);
    if (next == cells_.begin()) return;
    Cell& cell = std::prev(next)->second;
    if (cell.end <= at) return;
    Cell upper = cell;
    cell.end = at;
    cells_.emplace_hint(next, at, std::move(upper));
  }

  void erase(const AddressRange& range) {
    cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
  }

  void merge(const AddressRange& range) {
    auto cell = cells_.lower_bound(range.begin);
    if (cell != cells_.begin()) --cell;
    while (cell != cells_.end() && cell->first <= range.end) {
      const auto next = std::next(cell);
      if (next != cells_.end() && cell->second.end == next->first &&
          cell->second.write == next->second.write && cell->second.reads == next->second.reads) {
        cell->second.end = next->second.end;
        cells_.erase(next);
      } else {
        cell = next;
      }
    }
  }

  Cells cells_;
};

}  // namespace block_streamer::inline v1
