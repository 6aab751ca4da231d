// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/crc32c_kernels.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace block_streamer::inline v1 {

/// @brief CRC-32C (Castagnoli, reflected, as in iSCSI, ext4 and Btrfs) of `bytes`.
/// @param before  the sum of what precedes them: crc32c(b, crc32c(a)) is that of a and b together.
/// **Cost.** With SSE 4.2, found at run time, some bytes a clock cycle; otherwise about one.
[[nodiscard]] inline std::uint32_t crc32c(std::span<const std::byte> bytes,
                                          std::uint32_t before = 0) noexcept {
#ifdef BLOCK_STREAMER_CRC32C_SSE42
  if (detail::has_crc32c_instruction()) return detail::crc32c_sse42(bytes, before);
#endif
  return detail::crc32c_software(bytes, before);
}

/// @brief Appends sums: with it, the sum of a followed by b comes from those of a and of b.
/// Built for one length of b, then applied often. **Cost.** Building: some µs; applying: 4
/// look-ups.
class Crc32cJoin {
 public:
  /// @param byte_count  of the part that follows.
  explicit Crc32cJoin(std::uint64_t byte_count) noexcept : shift_{byte_count} {}
  [[nodiscard]] std::uint32_t operator()(std::uint32_t first, std::uint32_t second) const noexcept {
    return shift_(first) ^ second;
  }

 private:
  detail::Crc32cShift shift_;
};

}  // namespace block_streamer::inline v1
