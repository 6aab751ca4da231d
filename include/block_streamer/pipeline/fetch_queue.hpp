// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>
#include <block_streamer/plan/pass_plan.hpp>
#include <block_streamer/plan/read_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

/// One part on its way into a slot.
struct Fetch {
  PartId part{};
  std::uint32_t slot = 0;
  std::uint32_t after_visits =
      0;                    ///< its slot is free once so many visits of its pass were released
  std::uint64_t epoch = 0;  ///< the pass that asked for it
  const ReadPlan* reads = nullptr;
  std::uint32_t granted = 0;  ///< chunks whose read (or copy) was granted
  std::uint32_t arrived = 0;  ///< chunks that are in the slot, in the order of the device
  bool begun = false;         ///< the slot is this fetch's
  bool dead = false;          ///< failed: what is in flight only returns its ticket

  /// What is granted for it, one ticket each. A part in memory is copied as one.
  [[nodiscard]] std::uint32_t chunk_count() const noexcept {
    const std::size_t count = reads->chunks.size();
    return static_cast<std::uint32_t>(reads->in_memory ? std::min<std::size_t>(count, 1) : count);
  }
  [[nodiscard]] bool complete() const noexcept { return begun && arrived == chunk_count(); }
};

/// @brief Fetches in plan order, over passes. Ids are stable while a fetch is queued.
/// **Cost.** No allocation once it has held the largest pass.
class FetchQueue {
 public:
  /// @brief Room for `count` more.
  void reserve(std::size_t count) { fetches_.reserve(fetches_.size() + count); }
  void push(const Fetch& fetch) { fetches_.push_back(fetch); }
  [[nodiscard]] Fetch& operator[](std::uint64_t id) noexcept { return fetches_[id - base_]; }

  /// @brief The first fetch with something left to grant, or nullptr; `id` is its id.
  [[nodiscard]] Fetch* to_grant() noexcept {
    return cursor_ < fetches_.size() ? &fetches_[cursor_] : nullptr;
  }
  [[nodiscard]] std::uint64_t cursor_id() const noexcept { return base_ + cursor_; }
  void advance() noexcept { ++cursor_; }

  /// @brief Drops completed fetches from the front. Dead ones stay until clear(): reads in flight
  /// may still belong to them.
  void trim() {
    std::size_t done = 0;
    while (done < cursor_ && fetches_[done].complete()) ++done;
    fetches_.erase(fetches_.begin(), fetches_.begin() + static_cast<std::ptrdiff_t>(done));
    base_ += done;
    cursor_ -= done;
  }
  /// @brief Drops the fetches that have not begun and for which `doomed(fetch)` is true.
  template <class Doomed>
  void drop_unbegun(Doomed&& doomed) {
    const auto from = fetches_.begin() + static_cast<std::ptrdiff_t>(cursor_);
    fetches_.erase(
        std::remove_if(from, fetches_.end(), [&](const Fetch& f) { return !f.begun && doomed(f); }),
        fetches_.end());
  }
  /// @brief True if no fetch that has not begun satisfies `condition`.
  template <class Condition>
  [[nodiscard]] bool none_left(Condition&& condition) const {
    const auto from = fetches_.begin() + static_cast<std::ptrdiff_t>(cursor_);
    return std::none_of(from, fetches_.end(),
                        [&](const Fetch& f) { return !f.begun && !f.dead && condition(f); });
  }
  /// @brief Forgets everything. @pre nothing is in flight.
  void clear() noexcept {
    base_ += fetches_.size();
    fetches_.clear();
    cursor_ = 0;
  }
  [[nodiscard]] std::vector<Fetch>& all() noexcept { return fetches_; }
  [[nodiscard]] const std::vector<Fetch>& all() const noexcept { return fetches_; }
  void finish_granting() noexcept { cursor_ = fetches_.size(); }

 private:
  std::vector<Fetch> fetches_;
  std::uint64_t base_ = 0;  ///< id of the first
  std::size_t cursor_ = 0;  ///< everything before it is granted
};

}  // namespace block_streamer::inline v1
