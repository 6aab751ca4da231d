// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/ids.hpp>

#include <algorithm>
#include <vector>

namespace block_streamer::inline v1 {

/// What one block costs, in seconds: on the storage, on the link to the device, on the device.
/// A block in host memory has no read; a block whose slot is host memory has no copy.
struct BlockCost {
  double read_s = 0;
  double copy_s = 0;
  double compute_s = 0;  ///< of one visit
  friend bool operator==(const BlockCost&, const BlockCost&) = default;
};

/// What a planner knows of time. Only the proportions matter to it.
struct PassCosts {
  std::vector<BlockCost> blocks;  ///< one per block of the list

  [[nodiscard]] const BlockCost& of(PartId part) const { return blocks.at(index_of(part.block)); }
  friend bool operator==(const PassCosts&, const PassCosts&) = default;
};

/// @brief When fetches end. Storage and link each serve one fetch at a time, in order; a part is
/// copied while it is read, chunk by chunk, so a fetch alone takes the longer of the two.
class FetchClock {
 public:
  /// @param free  when the slot is free. @returns when the part is there.
  double fetch(double free, const BlockCost& cost) noexcept {
    const double begin = std::max(read_end_, free);
    read_end_ = begin + cost.read_s;
    copy_end_ = std::max(read_end_, std::max(copy_end_, begin) + cost.copy_s);
    return copy_end_;
  }

 private:
  double read_end_ = 0;
  double copy_end_ = 0;
};

/// @brief How long a fetch keeps the slower of storage and link.
[[nodiscard]] inline double fetch_seconds(const BlockCost& cost) noexcept {
  return std::max(cost.read_s, cost.copy_s);
}

}  // namespace block_streamer::inline v1
