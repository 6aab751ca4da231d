// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/read_place.hpp>

#include <exception>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// The first cause of a failure, and whether the device is lost with it. **Threads.** Externally
/// synchronised.
class Failure {
 public:
  /// @brief Keeps the cause if it is the first since clear().
  void set(std::exception_ptr cause) noexcept {
    lost_ = lost_ || is_sticky(cause);
    if (!cause_) cause_ = std::move(cause);
  }
  [[nodiscard]] std::exception_ptr cause() const noexcept { return cause_; }
  [[nodiscard]] bool lost() const noexcept { return lost_; }
  void clear() noexcept { cause_ = nullptr; }
  /// @throws DeviceError if no later call can succeed.
  void rethrow_if_lost() const {
    if (lost_)
      throw DeviceError{"the device context was lost by an earlier error; make a new streamer", 0,
                        true};
  }

 private:
  [[nodiscard]] static bool is_sticky(const std::exception_ptr& cause) noexcept {
    try {
      std::rethrow_exception(cause);
    } catch (const DeviceError& error) {
      return error.sticky();
    } catch (...) {
      return false;
    }
  }
  std::exception_ptr cause_;
  bool lost_ = false;
};

/// @brief What the visitor is told of a failed read: block, file, offset, tensor as far as the tier
/// knows, and the cause.
[[nodiscard]] inline std::exception_ptr read_failure(const AnyStorage& storage, BlockId block,
                                                     ByteRange image,
                                                     std::error_code error) noexcept {
  try {
    return std::make_exception_ptr(
        StorageError{to_string(PartId{block}) + ", " + read_place(storage, block, image),
                     "reading " + std::to_string(image.byte_count) + " bytes failed", error});
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace block_streamer::inline v1
