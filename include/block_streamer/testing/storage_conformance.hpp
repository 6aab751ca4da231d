// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/storage/storage_tier.hpp>
#include <block_streamer/testing/conformance.hpp>
#include <block_streamer/testing/image_conformance.hpp>
#include <block_streamer/testing/watched_reads.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>

namespace block_streamer::inline v1::testing {

struct TierSuiteOptions {
  std::size_t random_reads = 200;  ///< in flight together, some of them overlapping, some empty
  std::uint32_t seed = 1;
  /// A read outside its image ends with invalid_argument. The library's tiers promise it (by
  /// check_read); of a tier of one's own the concept does not ask it.
  bool refuses_bad_ranges = false;
  /// How long a read may take before it counts as lost.
  std::chrono::seconds patience{60};
  /// For tiers in virtual time: lets something happen; false if nothing can.
  std::function<bool()> progress{};
};

namespace detail {

[[nodiscard]] inline std::string name_of(BlockId block, ByteRange range) {
  return to_string(PartId{block}) + " [" + std::to_string(range.offset) + ", " +
         std::to_string(range.offset + range.byte_count) + ")";
}

/// The suite's steps over one tier.
template <storage_tier Tier>
class TierSuite {
 public:
  TierSuite(Tier tier, const Images& images, Report report, TierSuiteOptions options)
      : tier_{std::move(tier)},
        images_{images},
        checks_{std::move(report)},
        options_{std::move(options)} {}

  Conformance run() {
    if (!check_shape()) return checks_.result();
    check_whole_images();
    check_pieces();
    if (options_.refuses_bad_ranges) check_refusals();
    if constexpr (addressable_tier<Tier>) {
      if (is_addressable()) check_addresses();
    }
    if constexpr (locating_tier<Tier>) check_places();
    check_random_reads();
    check_moves();
    check_end_of_life();
    return checks_.result();
  }

 private:
  bool check_shape() {
    const Tier& tier = *tier_;
    if (!checks_.expect(tier.block_count() == images_.size(), "block_count() is that of the data",
                        [&] {
                          return std::to_string(tier.block_count()) + " instead of " +
                                 std::to_string(images_.size());
                        })) {
      return false;
    }
    bool good = true;
    for (std::size_t b = 0; b < images_.size(); ++b) {
      const BlockImage& image = tier.image(block_at(b));
      good &= checks_.expect(
          image.byte_count == images_[b].size(), "an image is as long as its data", [&] {
            return to_string(PartId{block_at(b)}) + " has " + std::to_string(image.byte_count) +
                   " bytes instead of " + std::to_string(images_[b].size());
          });
      checks_.expect(&image == &tier.image(block_at(b)), "an image's address is stable",
                     [&] { return to_string(PartId{block_at(b)}); });
      good &= check_image(image, block_at(b), checks_);
    }
    return good;
  }
  void check_whole_images() {
    WatchedReads reads;
    for (std::size_t b = 0; b < images_.size(); ++b) {
      reads.start(*tier_, block_at(b), {0, images_[b].size()});
    }
    expect_right(reads);
  }
  /// Every edge of the image: its first and last unit alone, and nothing at all at either end.
  void check_pieces() {
    WatchedReads reads;
    for (std::size_t b = 0; b < images_.size(); ++b) {
      const std::uint64_t size = images_[b].size();
      const std::uint64_t unit = tier_->image(block_at(b)).read_granularity;
      reads.start(*tier_, block_at(b), {0, 0});
      reads.start(*tier_, block_at(b), {size, 0});
      if (size < unit) continue;
      reads.start(*tier_, block_at(b), {0, unit});
      reads.start(*tier_, block_at(b), {size - unit, unit});
    }
    expect_right(reads);
  }
  void check_refusals() {
    const std::uint64_t size = images_[0].size();
    const std::uint64_t unit = tier_->image(block_at(0)).read_granularity;
    WatchedReads reads;
    reads.start(*tier_, block_at(0), {size, unit});
    reads.start(*tier_, block_at(0), {0, size + unit});
    reads.start(*tier_, block_at(0), {~std::uint64_t{0} - unit + 1, 2 * unit});
    reads.start(*tier_, block_at(images_.size()), {0, unit});
    if (!ended(reads)) return;
    for (const auto& read : reads.reads()) {
      checks_.expect(read.error == std::errc::invalid_argument && read.byte_count == 0,
                     "a read outside its image ends with invalid_argument",
                     [&] { return name_of(read.block, read.range) + ": " + how_it_ended(read); });
    }
  }
  void check_random_reads() {
    WatchedReads reads;
    start_random(reads, options_.random_reads, options_.seed);
    expect_right(reads);
  }
  void check_moves() {
    std::optional<Tier> moved{std::move(*tier_)};
    tier_.emplace(std::move(*moved));
    moved.reset();
    check_whole_images();
  }
  /// An erased tier says whether what it holds is addressable.
  [[nodiscard]] bool is_addressable() const {
    if constexpr (requires(const Tier& tier) { tier.addressable(); }) {
      return tier_->addressable();
    } else {
      return true;
    }
  }
  [[nodiscard]] bool is_in_memory(BlockId block) const {
    if constexpr (partly_addressable_tier<Tier>) {
      return tier_->in_memory(block);
    } else {
      return true;
    }
  }
  void check_addresses() {
    for (std::size_t b = 0; b < images_.size(); ++b) {
      const std::span<const std::byte> bytes = std::as_const(*tier_).bytes(block_at(b));
      if (!is_in_memory(block_at(b))) {
        checks_.expect(bytes.empty(), "bytes(block) is empty for a block that is not in memory",
                       [&] { return to_string(PartId{block_at(b)}); });
        continue;
      }
      checks_.expect(std::ranges::equal(bytes, images_[b]), "bytes(block) is the block's image",
                     [&] { return to_string(PartId{block_at(b)}); });
      const auto regions = std::as_const(*tier_).regions();
      const bool inside = std::ranges::any_of(regions, [&](std::span<std::byte> region) {
        return bytes.data() >= region.data() &&
               bytes.data() + bytes.size() <= region.data() + region.size();
      });
      checks_.expect(bytes.empty() || inside, "bytes(block) lies in one of regions()",
                     [&] { return to_string(PartId{block_at(b)}); });
    }
  }
  void check_places() {
    for (std::size_t b = 0; b < images_.size(); ++b) {
      checks_.expect(!std::as_const(*tier_).locate(block_at(b), 0).empty(),
                     "locate() names the place of every byte",
                     [&] { return to_string(PartId{block_at(b)}); });
    }
  }
  /// The tier goes while it is read.
  void check_end_of_life() {
    WatchedReads reads;
    start_random(reads, std::min<std::size_t>(options_.random_reads, 100), options_.seed + 1);
    tier_.reset();
    checks_.expect(reads.ended() == reads.reads().size(), "the destructor waits for every read",
                   [&] {
                     return std::to_string(reads.ended()) + " of " +
                            std::to_string(reads.reads().size()) + " had ended";
                   });
    expect_right(reads);
  }

  void start_random(WatchedReads& reads, std::size_t count, std::uint32_t seed) {
    std::mt19937 random{seed};
    for (std::size_t i = 0; i < count; ++i) {
      const BlockId block = block_at(random() % images_.size());
      const std::uint64_t unit = tier_->image(block).read_granularity;
      const std::uint64_t units = images_[index_of(block)].size() / unit;
      const std::uint64_t first = random() % (units + 1);
      reads.start(*tier_, block, {first * unit, random() % (units - first + 1) * unit});
    }
  }
  bool ended(WatchedReads& reads) {
    return checks_.expect(reads.wait(options_.progress, options_.patience), "every read ends", [&] {
      return std::to_string(reads.reads().size() - reads.ended()) + " reads did not";
    });
  }
  void expect_right(WatchedReads& reads) {
    if (!ended(reads)) return;
    for (const auto& read : reads.reads()) {
      const auto name = [&] { return name_of(read.block, read.range) + ": " + how_it_ended(read); };
      checks_.expect(read.calls == 1, "a completion is called exactly once", name);
      if (!checks_.expect(!read.error && read.byte_count == read.range.byte_count,
                          "a read within the image delivers all of its bytes", name)) {
        continue;
      }
      checks_.expect(read.buffer.guards_intact(), "a read writes inside `out` only", name);
      checks_.expect(holds(read), "the bytes are those of the image range", name);
    }
  }
  [[nodiscard]] bool holds(const WatchedReads::Read& read) const {
    const std::span<const std::byte> found = read.buffer.bytes();
    return found.empty() ||
           std::memcmp(found.data(), images_[index_of(read.block)].data() + read.range.offset,
                       found.size()) == 0;
  }
  static std::string how_it_ended(const WatchedReads::Read& read) {
    return std::to_string(read.calls) + " calls, " + std::to_string(read.byte_count) + " bytes, " +
           (read.error ? read.error.message() : "no error");
  }

  std::optional<Tier> tier_;
  const Images& images_;
  Checks checks_;
  TierSuiteOptions options_;
};

}  // namespace detail

/// @brief Checks that a tier keeps the promises of storage_tier, and those of addressable_tier and
/// locating_tier if it models them. It reads whole images, edges, nothing, and many ranges at once,
/// moves the tier and lets it go while it is being read.
/// @param images  what each block's image holds; at least one block.
/// @param report  given each broken promise. The suite goes on, and leaves out what cannot be.
/// **Threads.** The caller's, and the tier's own. **Cost.** Reads each image about four times.
template <storage_tier Tier>
Conformance check_storage_tier(Tier tier, const Images& images, Report report,
                               TierSuiteOptions options = {}) {
  return detail::TierSuite<Tier>{std::move(tier), images, std::move(report), std::move(options)}
      .run();
}

}  // namespace block_streamer::inline v1::testing
