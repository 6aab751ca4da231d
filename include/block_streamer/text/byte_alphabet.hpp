// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/utf8.hpp>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// The alphabet of byte-level tokenizers: every byte stands as one printable character. Bytes that
/// are printable in Latin-1 stand for themselves, the other 68 as U+0100, U+0101, ...
struct ByteAlphabet {
  std::array<std::uint16_t, 256> character{};  ///< of each byte
  std::array<std::int16_t, 512> byte{};        ///< of each character below U+0200, or -1

  constexpr ByteAlphabet() noexcept {
    byte.fill(-1);
    std::uint16_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool printable =
          (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      character[b] = printable ? static_cast<std::uint16_t>(b) : next++;
      byte[character[b]] = static_cast<std::int16_t>(b);
    }
  }
};

inline constexpr ByteAlphabet byte_alphabet{};

/// @brief Appends each byte of `bytes` as its character of the alphabet.
inline void append_as_characters(std::string& out, std::string_view bytes) {
  for (const char c : bytes) {
    append_utf8(out, byte_alphabet.character[static_cast<unsigned char>(c)]);
  }
}

/// @brief Appends the bytes that a token's characters stand for; a token with any other character
/// is appended as it is. `token` must be UTF-8.
inline void append_as_bytes(std::string& out, std::string_view token) {
  const std::size_t before = out.size();
  for (std::size_t at = 0; at < token.size();) {
    const Utf8Step step = utf8_step(token, at);
    at += step.length;
    const bool known =
        step.code_point < byte_alphabet.byte.size() && byte_alphabet.byte[step.code_point] >= 0;
    if (!known) {
      out.resize(before);
      out.append(token);
      return;
    }
    out += static_cast<char>(byte_alphabet.byte[step.code_point]);
  }
}

}  // namespace block_streamer::inline v1
