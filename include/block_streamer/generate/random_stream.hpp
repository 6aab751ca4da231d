// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace block_streamer::inline v1 {

/// @brief A stream of random numbers that a seed and a stream number fix for good, on every machine
/// and with every library: SplitMix64. Not for secrets.
/// Streams of one seed are independent: rows of a batch take one each.
/// **Threads.** One. **Cost.** 8 bytes of state.
class RandomStream {
 public:
  explicit RandomStream(std::uint64_t seed, std::uint64_t stream = 0) noexcept
      : state_{mixed(seed + golden * (mixed(stream + golden)))} {}

  /// @brief The next 64 bits.
  [[nodiscard]] std::uint64_t bits() noexcept { return mixed(state_ += golden); }
  /// @brief Uniform in [0, 1): a multiple of 2^-53.
  [[nodiscard]] double uniform() noexcept { return static_cast<double>(bits() >> 11U) * 0x1.0p-53; }

 private:
  static constexpr std::uint64_t golden = 0x9e3779b97f4a7c15ULL;

  static constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31U);
  }

  std::uint64_t state_;
};

}  // namespace block_streamer::inline v1
