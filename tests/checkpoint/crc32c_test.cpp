// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/crc32c.hpp>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

using Kernel = std::uint32_t (*)(std::span<const std::byte>, std::uint32_t);

/// Each implementation that runs here, the chosen one first.
std::vector<Kernel> kernels() {
  std::vector<Kernel> list{
      [](std::span<const std::byte> b, std::uint32_t crc) { return bs::crc32c(b, crc); },
      [](std::span<const std::byte> b, std::uint32_t crc) {
        return bs::detail::crc32c_software(b, crc);
      }};
#ifdef BLOCK_STREAMER_CRC32C_SSE42
  if (bs::detail::has_crc32c_instruction()) {
    list.push_back([](std::span<const std::byte> b, std::uint32_t crc) {
      return bs::detail::crc32c_sse42(b, crc);
    });
  }
#endif
  return list;
}

/// One bit at a time, by the definition.
std::uint32_t by_definition(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xffffffff;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78 : crc >> 1;
  }
  return ~crc;
}

std::vector<std::byte> some_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  std::uint32_t x = 1;
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((x = x * 1664525 + 1013904223) >> 24);
  return bytes;
}

}  // namespace

TEST_CASE("crc32c gives the published sums") {
  std::array<unsigned char, 32> up{};
  std::array<unsigned char, 32> down{};
  for (unsigned char i = 0; i < 32; ++i) up[i] = i, down[i] = static_cast<unsigned char>(31 - i);
  const std::array<unsigned char, 32> zeros{};
  std::array<unsigned char, 32> ones{};
  ones.fill(0xff);
  const std::string_view digits = "123456789";
  for (const Kernel kernel : kernels()) {
    // RFC 3720, B.4
    CHECK(kernel(std::as_bytes(std::span{zeros}), 0) == 0x8a9136aa);
    CHECK(kernel(std::as_bytes(std::span{ones}), 0) == 0x62a8ab43);
    CHECK(kernel(std::as_bytes(std::span{up}), 0) == 0x46dd794e);
    CHECK(kernel(std::as_bytes(std::span{down}), 0) == 0x113fdb5c);
    CHECK(kernel(std::as_bytes(std::span{digits}), 0) == 0xe3069283);
    CHECK(kernel({}, 0) == 0);
  }
}

TEST_CASE("every implementation agrees at any length and address") {
  const std::vector<std::byte> bytes = some_bytes(40000);
  for (const std::size_t begin : {0, 1, 3, 8}) {
    for (const std::size_t count : {1, 7, 8, 9, 63, 4095, 12287, 12288, 12289, 24576, 36900}) {
      const auto part = std::span{bytes}.subspan(begin, count);
      const std::uint32_t expected = by_definition(part);
      for (const Kernel kernel : kernels()) CHECK(kernel(part, 0) == expected);
    }
  }
}

TEST_CASE("sums continue and join at any cut") {
  const std::vector<std::byte> bytes = some_bytes(30001);
  const std::uint32_t whole = bs::crc32c(bytes);
  for (const std::size_t cut : {0, 1, 4096, 13000, 30000, 30001}) {
    const auto first = std::span{bytes}.first(cut);
    const auto second = std::span{bytes}.subspan(cut);
    for (const Kernel kernel : kernels()) CHECK(kernel(second, kernel(first, 0)) == whole);
    CHECK(bs::Crc32cJoin{second.size()}(bs::crc32c(first), bs::crc32c(second)) == whole);
  }
}
