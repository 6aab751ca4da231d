// SPDX-License-Identifier: Apache-2.0
// A tier in memory whose bytes depend on block and offset, and whose reads complete when and how a
// script says.
#pragma once

#include <block_streamer/storage/storage_tier.hpp>

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <system_error>
#include <vector>

namespace support {
namespace bs = block_streamer;

[[nodiscard]] inline std::byte image_byte(std::size_t block, std::uint64_t offset) {
  std::uint64_t x = (block + 1) * 0x9e3779b97f4a7c15ULL + offset * 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 31;
  return static_cast<std::byte>((x * 0x94d049bb133111ebULL) >> 56);
}

/// A block of a few segments at odd offsets with gaps between them.
[[nodiscard]] inline bs::BlockImage odd_image(std::mt19937& random, std::uint32_t granularity,
                                              std::uint32_t most_segments = 5) {
  bs::BlockImage image;
  image.read_granularity = granularity;
  std::uint64_t at = random() % 70, slot = 0;
  for (std::uint32_t n = random() % (most_segments + 1); n-- > 0;) {
    const std::uint64_t size = 1 + random() % 5000;
    image.segments.push_back({at, slot, size});
    image.layout.tensors.push_back(
        {{"t" + std::to_string(n), bs::DType::u8, {size}}, 0, slot, size});
    image.layout.slot_byte_count[0] = slot + size;
    at += size + random() % 90;
    slot = bs::round_up(slot + size, 256);
  }
  image.part_begin = {0, static_cast<std::uint32_t>(image.segments.size())};
  image.byte_count = bs::round_up(at, granularity);
  return image;
}

[[nodiscard]] inline std::vector<bs::BlockImage> odd_images(std::size_t blocks,
                                                            std::uint32_t granularity = 1,
                                                            unsigned seed = 1) {
  std::mt19937 random{seed};
  std::vector<bs::BlockImage> images;
  for (std::size_t b = 0; b < blocks; ++b) images.push_back(odd_image(random, granularity));
  images[blocks / 2] = bs::BlockImage{};  // a block without parameters is a block
  images[blocks / 2].read_granularity = granularity;
  return images;
}

/// How reads of a ScriptedTier end. Shared by test and tier.
struct ReadScript {
  bool hold = false;                                    ///< keep reads until `release`
  std::function<std::error_code(std::size_t)> outcome;  ///< by the read's number; default: success
  std::size_t reads = 0;                                ///< started so far
  std::uint64_t bytes = 0;                              ///< asked for so far
  std::deque<std::function<void()>> held;
  std::mutex mutex;

  /// Ends one held read, chosen by `pick`; false if none is held.
  bool release(std::size_t pick) {
    std::function<void()> operation;
    {
      const std::scoped_lock lock{mutex};
      if (held.empty()) return false;
      const auto at = held.begin() + static_cast<std::ptrdiff_t>(pick % held.size());
      operation = std::move(*at);
      held.erase(at);
    }
    operation();
    return true;
  }
};

class ScriptedTier {
 public:
  ScriptedTier(std::vector<bs::BlockImage> images, ReadScript& script)
      : images_{std::make_unique<std::vector<bs::BlockImage>>(std::move(images))},
        script_{&script} {}
  [[nodiscard]] std::size_t block_count() const noexcept { return images_->size(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept {
    return (*images_)[bs::index_of(b)];
  }
  void async_read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    std::size_t number = 0;
    bool hold = false;
    {
      const std::scoped_lock lock{script_->mutex};
      number = script_->reads++;
      script_->bytes += range.byte_count;
      hold = script_->hold;
    }
    auto finish = [this, block, range, out, number,
                   done = std::make_shared<bs::IoCompletion>(std::move(done))] {
      const std::error_code error = script_->outcome ? script_->outcome(number) : std::error_code{};
      if (!error) {
        for (std::uint64_t i = 0; i < range.byte_count; ++i)
          out[i] = image_byte(bs::index_of(block), range.offset + i);
      }
      (*done)(error, error ? 0 : range.byte_count);
    };
    if (!hold) return finish();
    const std::scoped_lock lock{script_->mutex};
    script_->held.emplace_back(std::move(finish));
  }

 private:
  std::unique_ptr<std::vector<bs::BlockImage>> images_;
  ReadScript* script_;
};
static_assert(bs::storage_tier<ScriptedTier>);

/// The same bytes in memory: an addressable tier.
class MemoryTier {
 public:
  explicit MemoryTier(std::vector<bs::BlockImage> images)
      : images_{std::make_unique<std::vector<bs::BlockImage>>(std::move(images))} {
    for (std::size_t b = 0; b < images_->size(); ++b) {
      std::vector<std::byte> bytes((*images_)[b].byte_count);
      for (std::uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = image_byte(b, i);
      bytes_.push_back(std::move(bytes));
    }
    for (auto& bytes : bytes_) regions_.emplace_back(bytes);
  }
  [[nodiscard]] std::size_t block_count() const noexcept { return images_->size(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept {
    return (*images_)[bs::index_of(b)];
  }
  void async_read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    std::memcpy(out.data(), bytes(b).data() + r.offset, r.byte_count);
    done({}, r.byte_count);
  }
  [[nodiscard]] std::span<const std::byte> bytes(bs::BlockId b) const noexcept {
    return bytes_[bs::index_of(b)];
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept { return regions_; }

 private:
  std::unique_ptr<std::vector<bs::BlockImage>> images_;
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<std::span<std::byte>> regions_;
};
static_assert(bs::addressable_tier<MemoryTier>);

/// Some blocks in memory, the others scripted: a partly addressable tier.
class MixedTier {
 public:
  /// @param in_memory  one flag per block.
  MixedTier(std::vector<bs::BlockImage> images, ReadScript& script,
            std::vector<std::uint8_t> in_memory)
      : read_{images, script}, held_{std::move(images)}, in_memory_{std::move(in_memory)} {
    for (std::size_t b = 0; b < in_memory_.size(); ++b) {
      if (in_memory_[b] != 0) regions_.push_back(held_.regions()[b]);
    }
  }
  [[nodiscard]] std::size_t block_count() const noexcept { return held_.block_count(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept { return held_.image(b); }
  void async_read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    read_.async_read(b, r, out, std::move(done));
  }
  [[nodiscard]] bool in_memory(bs::BlockId b) const noexcept {
    return in_memory_[bs::index_of(b)] != 0;
  }
  [[nodiscard]] std::span<const std::byte> bytes(bs::BlockId b) const noexcept {
    return in_memory(b) ? held_.bytes(b) : std::span<const std::byte>{};
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept { return regions_; }

 private:
  ScriptedTier read_;
  MemoryTier held_;
  std::vector<std::uint8_t> in_memory_;
  std::vector<std::span<std::byte>> regions_;
};
static_assert(bs::partly_addressable_tier<MixedTier>);

/// True if the slot holds the block's bytes, all of them.
[[nodiscard]] inline bool slot_is_right(const bs::BlockImage& image, std::size_t block,
                                        std::span<const std::byte> slot) {
  for (const bs::Segment& segment : image.segments) {
    for (std::uint64_t i = 0; i < segment.byte_count; ++i) {
      if (slot[segment.slot_offset + i] != image_byte(block, segment.image_offset + i))
        return false;
    }
  }
  return true;
}

/// Counts resident slots from the transitions, as an observer sees them.
struct ResidencyCount {
  std::uint64_t resident = 0, peak = 0, next_sequence = 0;
  bool in_order = true;
  void observe(const bs::Transition& t) noexcept {
    in_order = in_order && t.sequence == next_sequence++;
    if (t.from == bs::Residency::empty) peak = std::max(peak, ++resident);
    if (t.to == bs::Residency::empty) --resident;
  }
};

}  // namespace support
