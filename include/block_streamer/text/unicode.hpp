// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/utf8.hpp>

#include <utf8proc.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief General category N: decimal digits, letter-like numbers and others.
[[nodiscard]] inline bool is_numeric(std::uint32_t code_point) noexcept {
  if (code_point < 0x80) return code_point >= '0' && code_point <= '9';
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code_point))) {
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return true;
    default:
      return false;
  }
}

/// @brief The property White_Space, which differs from what many regex engines call space.
[[nodiscard]] constexpr bool is_white_space(std::uint32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

/// @brief A word character: alphabetic, mark, decimal digit, connector or join control.
[[nodiscard]] inline bool is_word_character(std::uint32_t c) noexcept {
  const bool lettered_symbol = (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
                               (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
  if (lettered_symbol || c == 0x200C || c == 0x200D) return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

namespace detail {

/// Puts every run of marks into canonical order. utf8proc's own exchange sort takes quadratic time
/// on a long run.
inline void sort_marks(std::vector<utf8proc_int32_t>& points) {
  const auto order = [](utf8proc_int32_t p) { return utf8proc_get_property(p)->combining_class; };
  for (auto run = points.begin(); run != points.end();) {
    if (order(*run) == 0) {
      ++run;
      continue;
    }
    const auto end = std::find_if(run, points.end(), [&](auto p) { return order(p) == 0; });
    std::stable_sort(run, end, [&](auto a, auto b) { return order(a) < order(b); });
    run = end;
  }
}

/// Canonical decomposition of valid UTF-8, marks in canonical order.
inline std::vector<utf8proc_int32_t> decompose_canonically(std::string_view text) {
  std::vector<utf8proc_int32_t> points;
  points.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    at += step.length;
    const auto point = static_cast<utf8proc_int32_t>(step.code_point);
    utf8proc_int32_t parts[8];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(point, parts, 8, UTF8PROC_DECOMPOSE, &boundary);
    if (count > 0 && count <= 8) {
      points.insert(points.end(), parts, parts + count);
    } else {
      points.push_back(point);
    }
  }
  sort_marks(points);
  return points;
}

}  // namespace detail

/// @brief Normalization form C of valid UTF-8. **Cost.** A scan when no character of `text` reaches
/// U+0300 (nothing below it can change), else O(n log n) and 5 n bytes.
[[nodiscard]] inline std::string to_nfc(std::string_view text) {
  const bool inert = std::all_of(text.begin(), text.end(),
                                 [](char c) { return static_cast<unsigned char>(c) < 0xCC; });
  if (inert) return std::string{text};
  std::vector<utf8proc_int32_t> points = detail::decompose_canonically(text);
  const auto count =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    append_utf8(out, static_cast<std::uint32_t>(points[static_cast<std::size_t>(i)]));
  }
  return out;
}

}  // namespace block_streamer::inline v1
