// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/pipeline/copy_out.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Pieces of page-locked host memory that are lent and come back, to be lent again: locking
/// memory costs more than a copy into it. There are never more pieces than were lent at once.
/// **Threads.** take() is the visitor's; pieces come back on any thread.
/// **Lifetime.** Shared: a piece may come back after everything else is gone.
template <execution_backend Backend>
class HostPlaces : public std::enable_shared_from_this<HostPlaces<Backend>> {
 public:
  explicit HostPlaces(Backend backend) : backend_{std::move(backend)} {}

  /// @param quiesce  called before memory is let go of: no copy touches lent or returned memory
  /// after it. @returns at least `byte_count` bytes.
  /// @throws StorageError, DeviceError if there is no memory.
  template <class Quiesce>
  [[nodiscard]] std::shared_ptr<std::byte> take(std::uint64_t byte_count, Quiesce&& quiesce) {
    std::unique_ptr<Memory> piece = take_free(byte_count);
    if (piece && piece->byte_count < byte_count) {
      quiesce();
      byte_count_ -= piece->byte_count;
      --count_;
      piece.reset();
    }
    if (!piece) piece = make(byte_count);
    std::byte* const data = piece->locked.bytes().data();
    return {data, [self = this->shared_from_this(), lent = piece.release()](std::byte*) {
              self->give_back(std::unique_ptr<Memory>{lent});
            }};
  }
  [[nodiscard]] std::uint64_t byte_count() const noexcept { return byte_count_; }

 private:
  struct Memory {
    LockedMemory<Backend> locked;
    std::uint64_t byte_count;
  };

  /// The smallest that is large enough; else the largest, to be replaced; null if all are lent.
  [[nodiscard]] std::unique_ptr<Memory> take_free(std::uint64_t byte_count) {
    const std::lock_guard lock{mutex_};
    if (free_.empty()) return nullptr;
    const auto better = [byte_count](const auto& a, const auto& b) {
      const bool fits = a->byte_count >= byte_count;
      if (fits != (b->byte_count >= byte_count)) return fits;
      return fits ? a->byte_count < b->byte_count : a->byte_count > b->byte_count;
    };
    const auto best = std::min_element(free_.begin(), free_.end(), better);
    std::unique_ptr<Memory> piece = std::move(*best);
    free_.erase(best);
    return piece;
  }
  [[nodiscard]] std::unique_ptr<Memory> make(std::uint64_t byte_count) {
    const std::uint64_t rounded = round_up(byte_count, tensor_alignment);
    auto piece =
        std::unique_ptr<Memory>{new Memory{LockedMemory<Backend>{backend_, rounded}, rounded}};
    const std::lock_guard lock{mutex_};
    free_.reserve(++count_);  // coming back must not fail
    byte_count_ += rounded;
    return piece;
  }
  void give_back(std::unique_ptr<Memory> piece) noexcept {
    const std::lock_guard lock{mutex_};
    free_.push_back(std::move(piece));
  }

  Backend backend_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Memory>> free_;
  std::size_t count_ = 0;         ///< lent and free
  std::uint64_t byte_count_ = 0;  ///< of all; the visitor's
};

}  // namespace block_streamer::inline v1
