// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// Text that is not UTF-8. `offset()` is the byte at which the first malformed sequence begins.
class Utf8Error : public Error {
 public:
  Utf8Error(const std::string& where, std::uint64_t offset)
      : Error{where + " (at byte " + std::to_string(offset) + "): not valid UTF-8"},
        offset_{offset} {}
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }

 private:
  std::uint64_t offset_;
};

/// What stands at one place of a byte string.
struct Utf8Step {
  enum class Kind : std::uint8_t { valid, invalid, incomplete };
  std::uint32_t code_point = 0xFFFD;  ///< meaningful when valid
  std::uint8_t length = 1;  ///< bytes of the character, or of the longest well-formed beginning
  Kind kind = Kind::invalid;
};

namespace detail {

/// Length a lead byte announces (0: no lead byte) and the allowed range of the second byte, which
/// excludes overlong forms, surrogates and values beyond U+10FFFF.
struct Utf8Lead {
  std::uint8_t length, low, high;
};

constexpr Utf8Lead utf8_lead(unsigned char byte) noexcept {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace detail

/// @brief Decodes what begins at `at`; `at < text.size()`. A malformed sequence has the length of
/// its longest well-formed beginning, at least 1: the unit that U+FFFD replaces.
[[nodiscard]] constexpr Utf8Step utf8_step(std::string_view text, std::size_t at) noexcept {
  const auto first = static_cast<unsigned char>(text[at]);
  const detail::Utf8Lead lead = detail::utf8_lead(first);
  if (lead.length == 0) return {};
  if (lead.length == 1) return {first, 1, Utf8Step::Kind::valid};
  std::uint32_t value = first & (0x7FU >> lead.length);
  for (std::uint8_t i = 1; i < lead.length; ++i) {
    if (at + i >= text.size()) return {0xFFFD, i, Utf8Step::Kind::incomplete};
    const auto byte = static_cast<unsigned char>(text[at + i]);
    const bool good = i == 1 ? byte >= lead.low && byte <= lead.high : byte >= 0x80 && byte <= 0xBF;
    if (!good) return {0xFFFD, i, Utf8Step::Kind::invalid};
    value = value << 6U | (byte & 0x3FU);
  }
  return {value, lead.length, Utf8Step::Kind::valid};
}

/// @brief Offset of the first byte at or after `from` that is not ASCII, or the size.
[[nodiscard]] inline std::size_t skip_ascii(std::string_view text, std::size_t from) noexcept {
  constexpr std::uint64_t high_bits = 0x8080808080808080ULL;
  for (std::uint64_t word = 0; from + sizeof word <= text.size(); from += sizeof word) {
    std::memcpy(&word, text.data() + from, sizeof word);
    if ((word & high_bits) != 0) break;
  }
  while (from < text.size() && static_cast<unsigned char>(text[from]) < 0x80) ++from;
  return from;
}

/// @brief Where `text` stops being UTF-8, if anywhere.
[[nodiscard]] inline std::optional<std::size_t> first_invalid_utf8(std::string_view text) noexcept {
  for (std::size_t at = skip_ascii(text, 0); at < text.size(); at = skip_ascii(text, at)) {
    const Utf8Step step = utf8_step(text, at);
    if (step.kind != Utf8Step::Kind::valid) return at;
    at += step.length;
  }
  return std::nullopt;
}

/// @throws Utf8Error naming `where` and the byte offset if `text` is not UTF-8.
inline void expect_utf8(std::string_view text, const std::string& where) {
  if (const auto bad = first_invalid_utf8(text)) throw Utf8Error{where, *bad};
}

/// @brief Appends one code point, which must be a Unicode scalar value.
inline void append_utf8(std::string& out, std::uint32_t code_point) {
  const auto tail = [&](unsigned shift) {
    out += static_cast<char>(0x80U | (code_point >> shift & 0x3FU));
  };
  if (code_point < 0x80) {
    out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    out += static_cast<char>(0xC0U | code_point >> 6U);
    tail(0);
  } else if (code_point < 0x10000) {
    out += static_cast<char>(0xE0U | code_point >> 12U);
    tail(6), tail(0);
  } else {
    out += static_cast<char>(0xF0U | code_point >> 18U);
    tail(12), tail(6), tail(0);
  }
}

inline constexpr std::string_view utf8_replacement = "\xEF\xBF\xBD";  ///< U+FFFD

/// @brief Appends `bytes` with every malformed sequence replaced by U+FFFD.
/// @param keep_incomplete leaves a character cut off at the end alone
/// @returns the bytes consumed: all, or up to the cut character.
inline std::size_t append_lossy_utf8(std::string& out, std::string_view bytes,
                                     bool keep_incomplete = false) {
  for (std::size_t at = 0; at < bytes.size();) {
    const Utf8Step step = utf8_step(bytes, at);
    if (keep_incomplete && step.kind == Utf8Step::Kind::incomplete) return at;
    out.append(step.kind == Utf8Step::Kind::valid ? bytes.substr(at, step.length)
                                                  : utf8_replacement);
    at += step.length;
  }
  return bytes.size();
}

}  // namespace block_streamer::inline v1
