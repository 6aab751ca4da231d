// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/read_place.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// A block whose whole image is to be read, and where to. Page-aligned, image.byte_count bytes.
struct ImageToFill {
  BlockId block{};
  std::span<std::byte> to;
};

namespace detail {

/// Keeps a few reads of whole images under way.
class ImageFill {
 public:
  explicit ImageFill(AnyStorage& tier) : tier_{tier} {}
  ImageFill(const ImageFill&) = delete;
  ImageFill& operator=(const ImageFill&) = delete;
  ~ImageFill() { wait_for(0); }

  void run(std::span<const ImageToFill> images) {
    for (const ImageToFill& image : images) {
      const std::uint64_t step = round_up(piece, tier_.image(image.block).read_granularity);
      for (std::uint64_t at = 0; at < image.to.size(); at += step) {
        if (!wait_for(most_reads - 1)) return;
        start(image, {at, std::min<std::uint64_t>(step, image.to.size() - at)});
      }
    }
    wait_for(0);
  }
  /// @throws StorageError for the first read that failed. @pre run() has returned.
  void throw_if_failed() {
    wait_for(0);
    if (!failure_) return;
    const auto& [block, range, error] = *failure_;
    throw StorageError{read_place(tier_, block, range),
                       "cannot read " + std::to_string(range.byte_count) + " bytes", error};
  }

 private:
  static constexpr std::uint64_t piece = std::uint64_t{8} << 20;
  static constexpr std::size_t most_reads = 8;
  struct Failed {
    BlockId block;
    ByteRange range;
    std::error_code error;
  };

  void start(const ImageToFill& image, ByteRange range) {
    {
      const std::scoped_lock lock{mutex_};
      ++under_way_;
    }
    const auto out = image.to.subspan(static_cast<std::size_t>(range.offset),
                                      static_cast<std::size_t>(range.byte_count));
    tier_.async_read(image.block, range, out,
                     [this, block = image.block, range](std::error_code error, std::size_t) {
                       const std::scoped_lock lock{mutex_};
                       if (error && !failure_) failure_ = Failed{block, range, error};
                       --under_way_;
                       ended_.notify_all();  // under the lock: the waiter may destroy this
                     });
  }
  /// Until at most so many are under way. False after a failure.
  bool wait_for(std::size_t count) {
    std::unique_lock lock{mutex_};
    ended_.wait(lock, [&] { return under_way_ <= count; });
    return !failure_;
  }

  AnyStorage& tier_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable ended_;
  std::size_t under_way_ = 0;
  std::optional<Failed> failure_;
};

}  // namespace detail

/// @brief Reads whole images, several pieces at a time; returns when all are there.
/// @throws StorageError naming where it comes from if a read fails; nothing is under way then.
inline void fill_images(AnyStorage& tier, std::span<const ImageToFill> images) {
  detail::ImageFill fill{tier};
  fill.run(images);
  fill.throw_if_failed();
}

}  // namespace block_streamer::inline v1
