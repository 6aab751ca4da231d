// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Which slots there are and which parts fit where. A slot of a larger class takes smaller
/// parts; a part never goes into a slot that is too small.
class SlotSpace {
 public:
  /// @brief Equal slots, each of which takes every part.
  explicit SlotSpace(std::uint32_t slot_count = 0) : class_of_slot_(slot_count, 0), classes_{0} {}
  /// @param slots  sizes in bytes, in the order of the slots. @param blocks  slot bytes of each
  /// block.
  /// @throws ContractViolation if a block fits nowhere.
  SlotSpace(const std::vector<std::uint64_t>& slots, const std::vector<std::uint64_t>& blocks)
      : classes_{slots} {
    std::sort(classes_.begin(), classes_.end());
    classes_.erase(std::unique(classes_.begin(), classes_.end()), classes_.end());
    for (const std::uint64_t bytes : slots) class_of_slot_.push_back(class_for(bytes));
    for (const std::uint64_t bytes : blocks) {
      class_of_block_.push_back(class_for(bytes));
      expects(class_of_block_.back() < classes_.size(), "every block fits into some slot");
    }
  }

  [[nodiscard]] std::uint32_t slot_count() const noexcept {
    return static_cast<std::uint32_t>(class_of_slot_.size());
  }
  [[nodiscard]] std::uint32_t class_count() const noexcept {
    return static_cast<std::uint32_t>(classes_.size());
  }
  [[nodiscard]] std::uint32_t class_of(std::uint32_t slot) const noexcept {
    return class_of_slot_[slot];
  }
  /// @brief The smallest class of slots that takes the part.
  [[nodiscard]] std::uint32_t class_of(PartId part) const noexcept {
    return class_of_block_.empty() ? 0 : class_of_block_[index_of(part.block)];
  }
  [[nodiscard]] bool fits(std::uint32_t slot, PartId part) const noexcept {
    return class_of(slot) >= class_of(part);
  }
  /// @brief How many slots take every part.
  [[nodiscard]] std::uint32_t largest_slot_count() const noexcept {
    return static_cast<std::uint32_t>(
        std::count(class_of_slot_.begin(), class_of_slot_.end(), class_count() - 1));
  }

 private:
  [[nodiscard]] std::uint32_t class_for(std::uint64_t bytes) const {
    return static_cast<std::uint32_t>(std::lower_bound(classes_.begin(), classes_.end(), bytes) -
                                      classes_.begin());
  }

  std::vector<std::uint32_t> class_of_slot_;
  std::vector<std::uint32_t> class_of_block_;  ///< empty: every block fits everywhere
  std::vector<std::uint64_t> classes_;         ///< ascending
};

}  // namespace block_streamer::inline v1
