// SPDX-License-Identifier: Apache-2.0
// Reads under watch, and what every storage tier of the library has to do.
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/storage/any_storage.hpp>

#include <support/catch.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <vector>

namespace block_streamer::testing_support {

using Bytes = std::vector<std::byte>;
using Images = std::vector<Bytes>;

inline constexpr std::byte poison{0xAB};

/// A value that depends on where the byte lies, so that a read from elsewhere shows.
inline std::byte pattern(std::uint64_t seed, std::uint64_t offset) {
  std::uint64_t x = (seed + 1) * 0x9E3779B97F4A7C15ULL + offset * 0xD1B54A32D192ED03ULL;
  x ^= x >> 29;
  return static_cast<std::byte>(x * 0xBF58476D1CE4E5B9ULL >> 56);
}
inline Bytes pattern_bytes(std::uint64_t seed, std::uint64_t offset, std::size_t byte_count) {
  Bytes bytes(byte_count);
  for (std::size_t i = 0; i < byte_count; ++i) bytes[i] = pattern(seed, offset + i);
  return bytes;
}
/// Images of odd sizes, one of them empty, for readers that make up their own blocks.
inline Images pattern_images() {
  Images images;
  const std::vector<std::size_t> sizes{1, 511, 4096, 0, 4097, 100'003};
  for (const std::size_t size : sizes) images.push_back(pattern_bytes(images.size(), 0, size));
  return images;
}
inline BlockImage plain_image(std::uint64_t byte_count, std::uint32_t granularity = 1) {
  BlockImage image;
  image.byte_count = byte_count;
  image.read_granularity = granularity;
  if (byte_count != 0) image.segments.push_back({0, 0, byte_count});
  image.part_begin = {0, static_cast<std::uint32_t>(image.segments.size())};
  image.layout.slot_byte_count = {byte_count};
  return image;
}

/// Page-aligned memory between two guards, filled with poison.
class Buffer {
 public:
  explicit Buffer(std::size_t byte_count)
      : size_{byte_count},
        memory_{static_cast<std::byte*>(
            ::operator new (byte_count + 2 * page, std::align_val_t{page}))} {
    std::fill_n(memory_.get(), byte_count + 2 * page, poison);
  }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {memory_.get() + page, size_}; }
  [[nodiscard]] bool guards_intact() const {
    const auto clean = [](std::span<const std::byte> guard) {
      return std::ranges::all_of(guard, [](std::byte b) { return b == poison; });
    };
    return clean({memory_.get(), page}) && clean({memory_.get() + page + size_, page});
  }
  [[nodiscard]] bool holds(std::span<const std::byte> expected) const {
    return std::ranges::equal(span(), expected);
  }

 private:
  static constexpr std::size_t page = 4096;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{page}); }
  };
  std::size_t size_;
  std::unique_ptr<std::byte, Free> memory_;
};

/// Reads under way and how each ended.
class Reads {
 public:
  struct Read {
    BlockId block;
    ByteRange range;
    Buffer buffer;
    std::error_code error;
    std::size_t byte_count = 0;
    int calls = 0;
  };

  Reads() = default;
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;
  ~Reads() { wait(); }

  template <class Tier>
  Read& start(Tier& tier, BlockId block, ByteRange range) {
    Read& read = reads_.emplace_back(
        Read{block, range, Buffer{static_cast<std::size_t>(range.byte_count)}, {}, 0, 0});
    tier.async_read(block, range, read.buffer.span(),
                    [this, &read](std::error_code error, std::size_t n) {
                      const std::scoped_lock lock{mutex_};
                      read.error = error;
                      read.byte_count = n;
                      ++read.calls;
                      ended_in_.push_back(&read);
                      ended_.notify_all();
                    });
    return read;
  }
  void wait() {
    std::unique_lock lock{mutex_};
    ended_.wait(lock, [&] { return ended_in_.size() >= reads_.size(); });
  }
  [[nodiscard]] std::size_t ended() const {
    const std::scoped_lock lock{mutex_};
    return ended_in_.size();
  }
  /// Numbers of the reads in the order in which they ended.
  [[nodiscard]] std::vector<std::size_t> order() const {
    const std::scoped_lock lock{mutex_};
    std::vector<std::size_t> numbers;
    for (const Read* ended : ended_in_) {
      for (std::size_t i = 0; i < reads_.size(); ++i) {
        if (&reads_[i] == ended) numbers.push_back(i);
      }
    }
    return numbers;
  }
  Read& operator[](std::size_t index) { return reads_[index]; }
  [[nodiscard]] std::size_t size() const { return reads_.size(); }

  void check_all(const Images& images) {
    wait();
    for (const Read& read : reads_) {
      const Bytes& image = images[index_of(read.block)];
      REQUIRE(read.error == std::error_code{});
      REQUIRE(read.byte_count == read.range.byte_count);
      REQUIRE(read.calls == 1);
      REQUIRE(read.buffer.guards_intact());
      REQUIRE(read.buffer.holds(
          std::span{image}.subspan(static_cast<std::size_t>(read.range.offset),
                                   static_cast<std::size_t>(read.range.byte_count))));
    }
  }

 private:
  mutable std::mutex mutex_;  // guards how the reads ended
  std::condition_variable ended_;
  std::deque<Read> reads_;
  std::vector<const Read*> ended_in_;
};

/// One read, to its end.
template <class Tier>
std::error_code read_error(Tier& tier, BlockId block, ByteRange range) {
  Reads reads;
  auto& read = reads.start(tier, block, range);
  reads.wait();
  return read.error;
}

template <class Tier>
ByteRange random_range(const Tier& tier, BlockId block, std::mt19937& random) {
  const BlockImage& image = tier.image(block);
  const std::uint64_t units = image.byte_count / image.read_granularity;
  const std::uint64_t first = std::uniform_int_distribution<std::uint64_t>{0, units}(random);
  const std::uint64_t count =
      std::uniform_int_distribution<std::uint64_t>{0, units - first}(random);
  return {first * image.read_granularity, count * image.read_granularity};
}

template <class Tier>
void start_random_reads(Reads& reads, Tier& tier, std::size_t count, std::uint32_t seed) {
  std::mt19937 random{seed};
  for (std::size_t i = 0; i < count; ++i) {
    const BlockId block = block_at(random() % tier.block_count());
    reads.start(tier, block, random_range(tier, block, random));
  }
}

template <class Tier>
void check_whole_images(Tier& tier, const Images& images) {
  REQUIRE(tier.block_count() == images.size());
  Reads reads;
  for (std::size_t b = 0; b < images.size(); ++b) {
    REQUIRE(tier.image(block_at(b)).byte_count == images[b].size());
    REQUIRE(&tier.image(block_at(b)) == &tier.image(block_at(b)));
    reads.start(tier, block_at(b), {0, images[b].size()});
  }
  reads.check_all(images);
}

/// The suite that ships with the library, and every Asio token.
/// @param make returns a fresh tier; @param images what it should deliver, at least one byte first.
void check_tier(const std::function<AnyStorage()>& make, const Images& images);

}  // namespace block_streamer::testing_support
