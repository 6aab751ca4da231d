// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A regular expression over whole module names, as adapter files hold them. Such a file is
/// not trusted: a pattern that needs absurdly many steps is an error, never a hang.
/// **Threads.** Const use from several threads.
class NamePattern {
 public:
  /// What of a name the expression is to match: all of it, or its last components.
  enum class Extent : std::uint8_t { whole, end };

  /// @param where  names the file and the field in messages, which show the pattern as it was
  /// given.
  /// @throws FormatError if it is no pattern.
  NamePattern(const std::string& pattern, std::string where, Extent extent = Extent::whole)
      : where_{std::move(where)} {
    const std::string text = extent == Extent::end ? "(.*\\.)?(" + pattern + ")" : pattern;
    // Both ends are anchored by options, so an alternative cannot slip out.
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(text.data()), text.size(),
                                PCRE2_UTF | PCRE2_ANCHORED | PCRE2_ENDANCHORED, &error, &offset,
                                nullptr));
    if (!code_) {
      throw FormatError{where_, "\"" + pattern + "\" is not a regular expression: " + words(error)};
    }
  }

  /// @brief True if the whole of `name` matches. @throws FormatError if matching takes too long.
  [[nodiscard]] bool matches(std::string_view name) const {
    const std::unique_ptr<pcre2_match_data_8, Free> data{pcre2_match_data_create_8(1, nullptr)};
    const std::unique_ptr<pcre2_match_context_8, Free> context{
        pcre2_match_context_create_8(nullptr)};
    if (!data || !context) throw std::bad_alloc{};
    pcre2_set_match_limit_8(context.get(), 1'000'000);
    pcre2_set_heap_limit_8(context.get(), 16 * 1024);  // KiB
    const int result = pcre2_match_8(code_.get(), reinterpret_cast<PCRE2_SPTR8>(name.data()),
                                     name.size(), 0, 0, data.get(), context.get());
    if (result >= 0) return true;
    if (result == PCRE2_ERROR_NOMATCH) return false;
    throw FormatError{where_, "a pattern cannot be matched against \"" + std::string{name} + "\""};
  }

 private:
  [[nodiscard]] static std::string words(int error) {
    std::array<PCRE2_UCHAR8, 128> text{};
    pcre2_get_error_message_8(error, text.data(), text.size());  // cut off where it is longer
    return reinterpret_cast<const char*>(text.data());
  }

  struct Free {
    void operator()(pcre2_code_8* p) const noexcept { pcre2_code_free_8(p); }
    void operator()(pcre2_match_data_8* p) const noexcept { pcre2_match_data_free_8(p); }
    void operator()(pcre2_match_context_8* p) const noexcept { pcre2_match_context_free_8(p); }
  };
  std::string where_;
  std::unique_ptr<pcre2_code_8, Free> code_;
};

}  // namespace block_streamer::inline v1
