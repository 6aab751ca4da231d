// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/text/utf8.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

namespace detail {

/// Rewrites an Oniguruma pattern (Ruby syntax, the dialect of tokenizer files) for PCRE2. What both
/// read alike is copied, what they read differently is spelled out, everything else is refused.
class RegexTranslator {
 public:
  RegexTranslator(std::string_view pattern, const std::string& where)
      : in_{pattern}, where_{where} {}

  [[nodiscard]] std::string run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        escape(false);
      } else if (c == '[') {
        character_class();
      } else if (c == '(') {
        group();
      } else if (c == '{') {
        repeat();
      } else {
        if (c == '^' || c == '$') refuse(std::string{"the anchor "} + c);
        out_ += c;
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  /// White_Space, which PCRE2's \s exceeds by U+180E.
  static constexpr std::string_view spaces =
      "\\t-\\r\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}"
      "\\x{205F}\\x{3000}";
  /// Oniguruma's \w: alphabetic, marks, decimal digits, connectors, and Latin-1's raised digits and
  /// fractions.
  static constexpr std::string_view word =
      "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\xB2\\xB3\\xB9\\xBC-\\xBE\\x{24B6}-\\x{24E9}"
      "\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";

  [[noreturn]] void refuse(const std::string& what) const {
    throw UnsupportedError{where_ + ": the pattern uses " + what + " (at character byte " +
                           std::to_string(at_) + "), which is not supported"};
  }
  [[nodiscard]] char peek(std::size_t ahead) const {
    return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0';
  }

  void escape(bool in_class) {
    const char c = peek(1);
    if (at_ + 1 >= in_.size()) refuse("a lone backslash");
    if (c == 'p' || c == 'P') return property();
    if (c == 'x' || c == 'u') return code_point();
    at_ += 2;
    switch (c) {
      case 's':
        return shorthand(spaces, in_class);
      case 'w':
        return shorthand(word, in_class);
      case 'S':
        out_ += in_class ? "\\S\\x{180E}" : "[\\S\\x{180E}]";
        return;
      case 'W':
        if (!in_class) return void(out_.append("[^").append(word).append("]"));
        break;
      case 'd':
      case 'D':
      case 'r':
      case 'n':
      case 't':
      case 'f':
        out_.append({'\\', c});
        return;
      case 'v':
        out_ += "\\x0B";
        return;
      default:
        if (!is_alphanumeric(c) && static_cast<unsigned char>(c) < 0x80) {
          out_.append({'\\', c});
          return;
        }
    }
    at_ -= 2;
    refuse(std::string{"\\"} + c);
  }

  void shorthand(std::string_view members, bool in_class) {
    out_.append(in_class ? "" : "[").append(members).append(in_class ? "" : "]");
  }

  /// General categories only: both engines agree on them, up to their Unicode versions.
  void property() {
    constexpr std::string_view major = "LMNPSZC";
    constexpr std::string_view minor = "ultmocendskfi";
    const std::size_t end = in_.find('}', at_);
    const bool braced = peek(2) == '{' && end != std::string_view::npos;
    const std::string_view name = braced ? in_.substr(at_ + 3, end - at_ - 3) : "";
    const bool category = (name.size() == 1 || name.size() == 2) &&
                          major.find(name[0]) != std::string_view::npos &&
                          (name.size() == 1 || minor.find(name[1]) != std::string_view::npos);
    if (!category)
      refuse("the property " + std::string{in_.substr(at_, braced ? name.size() + 4 : 3)});
    out_.append(in_.substr(at_, end + 1 - at_));
    at_ = end + 1;
  }

  void code_point() {
    const bool braced = peek(1) == 'x' && peek(2) == '{';
    const std::size_t first = at_ + (braced ? 3 : 2);
    const std::size_t count = braced ? 8 : peek(1) == 'x' ? 2 : 4;
    std::size_t end = first;
    while (end < in_.size() && end - first < count && is_hex(in_[end])) ++end;
    const bool whole =
        braced ? end > first && end < in_.size() && in_[end] == '}' : end - first == count;
    if (!whole) refuse("an incomplete escape");
    const std::string digits{in_.substr(first, end - first)};
    const unsigned long value = std::stoul(digits, nullptr, 16);
    // Without braces Oniguruma reads \x80 and up as a byte, not as a character.
    if (peek(1) == 'x' && !braced && value >= 0x80) refuse("a byte escape");
    out_.append("\\x{").append(digits).append("}");
    at_ = end + (braced ? 1 : 0);
  }

  void character_class() {
    out_ += '[';
    ++at_;
    if (peek(0) == '^') out_ += '^', ++at_;
    if (peek(0) == ']') refuse("] as the first member of a class");
    while (at_ < in_.size() && in_[at_] != ']') {
      if (in_[at_] == '\\') {
        escape(true);
        continue;
      }
      if (in_[at_] == '[') refuse("a class within a class");
      if (in_[at_] == '&' && peek(1) == '&') refuse("a class intersection");
      out_ += in_[at_++];
    }
    if (at_ == in_.size()) refuse("an unclosed class");
    out_ += ']';
    ++at_;
  }

  void group() {
    constexpr std::string_view known[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    if (peek(1) != '?') {
      out_ += '(';
      ++at_;
      return;
    }
    const std::string_view rest = in_.substr(at_);
    const auto* match = std::find_if(std::begin(known), std::end(known), [&](auto prefix) {
      return rest.substr(0, prefix.size()) == prefix;
    });
    if (match == std::end(known)) refuse("the group " + std::string{rest.substr(0, 4)});
    out_.append(*match);
    at_ += match->size();
  }

  /// A count {n}, {n,} or {n,m}; a + or ? after it means different things to the two engines.
  void repeat() {
    std::size_t end = at_ + 1;
    while (end < in_.size() && (is_digit(in_[end]) || in_[end] == ',')) ++end;
    const bool count = is_digit(peek(1)) && end < in_.size() && in_[end] == '}' &&
                       std::count(in_.begin() + static_cast<std::ptrdiff_t>(at_),
                                  in_.begin() + static_cast<std::ptrdiff_t>(end), ',') <= 1;
    if (!count) refuse("{ outside a count");
    out_.append(in_.substr(at_, end + 1 - at_));
    at_ = end + 1;
    if (peek(0) == '+' || peek(0) == '?') refuse("a suffix after a count");
  }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static bool is_hex(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  }
  static bool is_alphanumeric(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  }

  std::string_view in_;
  const std::string& where_;
  std::string out_;
  std::size_t at_ = 0;
};

}  // namespace detail

/// @brief The PCRE2 spelling of a tokenizer file's pattern.
/// @param where names file and component in messages
/// @throws UnsupportedError naming the construct that has no agreed meaning.
[[nodiscard]] inline std::string translate_pattern(std::string_view pattern,
                                                   const std::string& where) {
  return detail::RegexTranslator{pattern, where}.run();
}

}  // namespace block_streamer::inline v1
