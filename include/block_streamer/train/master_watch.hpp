// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/masters.hpp>
#include <block_streamer/core/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Knows with which version of its masters each block was last fetched.
/// Versions see what LibTorch sees: not writes through `.data()` or pointers. So blocks with
/// masters that train always count as changed; for a frozen one such a write must be followed by
/// one that LibTorch sees.
/// **Cost.** O(masters) a forward. **Threads.** The visitor's.
class MasterWatch {
 public:
  /// @param masters  may be null. @param train  those that require a gradient are trained.
  MasterWatch(std::shared_ptr<const Masters> masters, bool train)
      : masters_{std::move(masters)}, train_{train} {
    if (masters_ == nullptr) return;
    for (const Master& master : masters_->all()) versions_.push_back(master.tensor._version());
  }

  /// @brief The blocks whose residency is not to be trusted by a forward that begins now.
  [[nodiscard]] std::vector<PartId> stale() {
    std::vector<bool> changed(versions_.size());
    for (std::uint32_t m = 0; m < versions_.size(); ++m) {
      const at::Tensor& tensor = (*masters_)[m].tensor;
      const std::int64_t version = tensor._version();
      changed[m] = (train_ && tensor.requires_grad()) || version != versions_[m];
      versions_[m] = version;
    }
    std::vector<PartId> parts;
    for (std::size_t b = 0; b < masters_->block_count(); ++b) {
      for (const std::uint32_t m : masters_->of(block_at(b))) {
        if (!changed[m]) continue;
        parts.push_back({block_at(b)});
        break;
      }
    }
    return parts;
  }

 private:
  std::shared_ptr<const Masters> masters_;
  bool train_;
  std::vector<std::int64_t> versions_;
};

}  // namespace block_streamer::inline v1
