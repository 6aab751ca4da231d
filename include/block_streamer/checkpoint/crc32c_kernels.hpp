// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#if defined(__x86_64__) && defined(__GNUC__)
#define BLOCK_STREAMER_CRC32C_SSE42 1
#endif

namespace block_streamer::inline v1::detail {

inline constexpr std::uint32_t crc32c_polynomial = 0x82f63b78;  // reflected

/// The register after `byte` zero bytes more, as a linear map: column i is where bit i goes.
using Crc32cMatrix = std::array<std::uint32_t, 32>;

[[nodiscard]] constexpr std::uint32_t crc32c_apply(const Crc32cMatrix& matrix,
                                                   std::uint32_t vector) noexcept {
  std::uint32_t sum = 0;
  for (std::size_t bit = 0; vector != 0; ++bit, vector >>= 1U) {
    if ((vector & 1U) != 0) sum ^= matrix[bit];
  }
  return sum;
}
[[nodiscard]] constexpr Crc32cMatrix crc32c_product(const Crc32cMatrix& a,
                                                    const Crc32cMatrix& b) noexcept {
  Crc32cMatrix result{};
  for (std::size_t bit = 0; bit < result.size(); ++bit) result[bit] = crc32c_apply(a, b[bit]);
  return result;
}
/// The map of one zero bit.
[[nodiscard]] constexpr Crc32cMatrix crc32c_bit_matrix() noexcept {
  Crc32cMatrix matrix{crc32c_polynomial};
  for (std::size_t bit = 1; bit < matrix.size(); ++bit) matrix[bit] = std::uint32_t{1} << (bit - 1);
  return matrix;
}

/// What `byte_count` zero bytes do to the register, as four tables of 256.
class Crc32cShift {
 public:
  constexpr explicit Crc32cShift(std::uint64_t byte_count) noexcept {
    Crc32cMatrix power = crc32c_bit_matrix();
    for (int i = 0; i < 3; ++i) power = crc32c_product(power, power);  // one byte
    Crc32cMatrix map{};
    for (std::size_t bit = 0; bit < map.size(); ++bit) map[bit] = std::uint32_t{1} << bit;
    for (; byte_count != 0; byte_count >>= 1U) {
      if ((byte_count & 1U) != 0) map = crc32c_product(power, map);
      power = crc32c_product(power, power);
    }
    for (std::size_t part = 0; part < tables_.size(); ++part) {
      for (std::uint32_t byte = 0; byte < 256; ++byte) {
        tables_[part][byte] = crc32c_apply(map, byte << (8 * part));
      }
    }
  }
  [[nodiscard]] constexpr std::uint32_t operator()(std::uint32_t crc) const noexcept {
    return tables_[0][crc & 0xffU] ^ tables_[1][crc >> 8U & 0xffU] ^
           tables_[2][crc >> 16U & 0xffU] ^ tables_[3][crc >> 24U];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_{};
};

/// tables[n][b]: what byte b does when n zero bytes follow it.
using Crc32cTables = std::array<std::array<std::uint32_t, 256>, 8>;

[[nodiscard]] constexpr Crc32cTables make_crc32c_tables() noexcept {
  Crc32cTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? crc32c_polynomial : 0U);
    }
    tables[0][byte] = crc;
  }
  for (std::size_t n = 1; n < tables.size(); ++n) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t last = tables[n - 1][byte];
      tables[n][byte] = (last >> 8U) ^ tables[0][last & 0xffU];
    }
  }
  return tables;
}
inline constexpr Crc32cTables crc32c_tables = make_crc32c_tables();

[[nodiscard]] inline std::uint32_t crc32c_software(std::span<const std::byte> bytes,
                                                   std::uint32_t before) noexcept {
  const Crc32cTables& t = crc32c_tables;
  std::uint32_t crc = ~before;
  const auto at = [&](std::size_t i) { return static_cast<std::uint32_t>(bytes[i]); };
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    const std::uint32_t low = crc ^ (at(0) | at(1) << 8U | at(2) << 16U | at(3) << 24U);
    crc = t[7][low & 0xffU] ^ t[6][low >> 8U & 0xffU] ^ t[5][low >> 16U & 0xffU] ^
          t[4][low >> 24U] ^ t[3][at(4)] ^ t[2][at(5)] ^ t[1][at(6)] ^ t[0][at(7)];
  }
  for (const std::byte byte : bytes) {
    crc = (crc >> 8U) ^ t[0][(crc ^ static_cast<std::uint32_t>(byte)) & 0xffU];
  }
  return ~crc;
}

#ifdef BLOCK_STREAMER_CRC32C_SSE42

[[nodiscard]] inline bool has_crc32c_instruction() noexcept {
  return __builtin_cpu_supports("sse4.2") != 0;
}

/// Bytes of one of the three streams that are summed side by side: an instruction takes three
/// cycles, and one begins in each.
inline constexpr std::size_t crc32c_lane = 4096;
inline constexpr Crc32cShift crc32c_lane_shift{crc32c_lane};

[[nodiscard, gnu::target("sse4.2")]] inline std::uint32_t crc32c_sse42(
    std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  const auto word = [](const std::byte* from) noexcept {
    unsigned long long value = 0;
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  unsigned long long crc = ~before;
  for (; bytes.size() >= 3 * crc32c_lane; bytes = bytes.subspan(3 * crc32c_lane)) {
    unsigned long long second = 0;
    unsigned long long third = 0;
    for (const std::byte *p = bytes.data(), *end = p + crc32c_lane; p != end; p += 8) {
      crc = __builtin_ia32_crc32di(crc, word(p));
      second = __builtin_ia32_crc32di(second, word(p + crc32c_lane));
      third = __builtin_ia32_crc32di(third, word(p + 2 * crc32c_lane));
    }
    crc = crc32c_lane_shift(static_cast<std::uint32_t>(crc)) ^ second;
    crc = crc32c_lane_shift(static_cast<std::uint32_t>(crc)) ^ third;
  }
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    crc = __builtin_ia32_crc32di(crc, word(bytes.data()));
  }
  auto last = static_cast<std::uint32_t>(crc);
  for (const std::byte byte : bytes) {
    last = __builtin_ia32_crc32qi(last, static_cast<unsigned char>(byte));
  }
  return ~last;
}

#endif

}  // namespace block_streamer::inline v1::detail
