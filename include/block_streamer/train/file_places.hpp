// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/scratch_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Places in a scratch file that are lent and come back, to be lent again; when all are back
/// the file is filled from its beginning.
/// **Threads.** Any. **Lifetime.** Shared: a place may come back after everything else is gone.
class FilePlaces : public std::enable_shared_from_this<FilePlaces> {
 public:
  /// @throws StorageError naming the folder if no file can be made there.
  explicit FilePlaces(const std::filesystem::path& folder)
      : folder_{folder.string()}, file_{folder} {}

  /// @returns where the place begins.
  [[nodiscard]] std::shared_ptr<const std::uint64_t> take(std::uint64_t byte_count) {
    auto place = std::make_unique<Place>(lend(byte_count));
    const std::uint64_t* const begin = &place->begin;
    return {begin, [self = shared_from_this(), lent = place.release()](const std::uint64_t*) {
              self->give_back(std::unique_ptr<Place>{lent});
            }};
  }
  /// @throws StorageError naming the folder, the offset and the cause.
  void write(std::uint64_t begin, std::span<const std::byte> bytes) const {
    if (const auto error = file_.write_at(begin, bytes)) {
      fail("writing the inputs of blocks", begin, bytes.size(), error,
           "; free space there or name another folder");
    }
  }
  void read(std::uint64_t begin, std::span<std::byte> bytes) const {
    if (const auto error = file_.read_at(begin, bytes))
      fail("reading the inputs of blocks", begin, bytes.size(), error, "");
  }
  /// @brief The size that the file has reached.
  [[nodiscard]] std::uint64_t byte_count() const {
    const std::lock_guard lock{mutex_};
    return reached_;
  }

 private:
  struct Place {
    std::uint64_t begin = 0;
    std::uint64_t byte_count = 0;
  };

  [[nodiscard]] Place lend(std::uint64_t byte_count) {
    const std::uint64_t wanted = round_up(byte_count, std::uint64_t{4096});
    const std::lock_guard lock{mutex_};
    free_.reserve(lent_ + 1 + free_.size());  // coming back must not fail
    ++lent_;
    for (auto place = free_.begin(); place != free_.end(); ++place) {
      if (place->byte_count != wanted) continue;
      const Place found = *place;
      free_.erase(place);
      return found;
    }
    const Place added{end_, wanted};
    end_ += wanted;
    reached_ = std::max(reached_, end_);
    return added;
  }
  void give_back(std::unique_ptr<Place> place) noexcept {
    const std::lock_guard lock{mutex_};
    free_.push_back(*place);
    if (--lent_ > 0) return;
    free_.clear();
    end_ = 0;
  }
  [[noreturn]] void fail(const std::string& what, std::uint64_t begin, std::size_t byte_count,
                         std::error_code error, const std::string& advice) const {
    throw StorageError{folder_, what + " (" + std::to_string(byte_count) + " bytes at " +
                                    std::to_string(begin) +
                                    " of the file) failed: " + error.message() + advice};
  }

  std::string folder_;
  ScratchFile file_;
  mutable std::mutex mutex_;
  std::vector<Place> free_;
  std::size_t lent_ = 0;
  std::uint64_t end_ = 0;      ///< of the places
  std::uint64_t reached_ = 0;  ///< by the end so far
};

}  // namespace block_streamer::inline v1
