// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/io_completion.hpp>

#include <cstddef>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Several reads that are one to whoever waits for them: reports once, when the last part
/// has ended, the first error. Destroys itself then.
/// **Threads.** Parts end on any.
class JoinedReads {
 public:
  /// @brief Takes `done` over. @pre part_count >= 1; part() is then called that often.
  /// @returns nullptr after reporting it to `done`, if memory is short.
  [[nodiscard]] static JoinedReads* make(std::size_t part_count, std::size_t byte_count,
                                         IoCompletion& done) noexcept {
    auto* const joined = new (std::nothrow) JoinedReads{part_count, byte_count};
    if (joined == nullptr) {
      done(std::make_error_code(std::errc::not_enough_memory), 0);
      return nullptr;
    }
    joined->done_ = std::move(done);
    return joined;
  }
  [[nodiscard]] IoCompletion part() noexcept {
    return [this](std::error_code error, std::size_t) { ended(error); };
  }

 private:
  JoinedReads(std::size_t part_count, std::size_t byte_count) noexcept
      : left_{part_count}, byte_count_{byte_count} {}

  void ended(std::error_code error) noexcept {
    {
      const std::scoped_lock lock{mutex_};
      if (error && !error_) error_ = error;
      if (--left_ != 0) return;
    }
    IoCompletion done = std::move(done_);
    const std::error_code first = error_;
    const std::size_t byte_count = first ? 0 : byte_count_;
    delete this;
    done(first, byte_count);
  }

  std::mutex mutex_;  // guards left_ and error_
  std::size_t left_;
  std::size_t byte_count_;
  std::error_code error_;
  IoCompletion done_;
};

}  // namespace block_streamer::inline v1
