// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/text/regex_dialect.hpp>
#include <block_streamer/text/utf8.hpp>

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

namespace detail {
struct Pcre2Free {
  void operator()(pcre2_code_8* p) const noexcept { pcre2_code_free_8(p); }
  void operator()(pcre2_match_data_8* p) const noexcept { pcre2_match_data_free_8(p); }
  void operator()(pcre2_match_context_8* p) const noexcept { pcre2_match_context_free_8(p); }
  void operator()(pcre2_compile_context_8* p) const noexcept { pcre2_compile_context_free_8(p); }
  void operator()(pcre2_jit_stack_8* p) const noexcept { pcre2_jit_stack_free_8(p); }
};
template <typename T>
using Pcre2Ptr = std::unique_ptr<T, Pcre2Free>;
}  // namespace detail

/// A half-open byte range of the text searched.
struct TextMatch {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// Working memory of one thread's searches with one Regex.
class RegexScratch {
 private:
  friend class Regex;
  detail::Pcre2Ptr<pcre2_match_data_8> data_;
  detail::Pcre2Ptr<pcre2_match_context_8> context_;
  detail::Pcre2Ptr<pcre2_jit_stack_8> stack_;
};

/// A compiled pattern of a tokenizer file, matched over UTF-8 with Unicode properties.
///
/// **Threads.** Const use from several threads, each with its own RegexScratch.
class Regex {
 public:
  /// @param where names file and component in messages
  /// @throws UnsupportedError if the pattern uses a construct with no agreed meaning.
  /// @throws FormatError if it is not a pattern.
  Regex(std::string_view pattern, const std::string& path, const std::string& where)
      : where_{path + ": " + where} {
    expect_utf8(pattern, where_);
    const std::string translated = translate_pattern(pattern, where_);
    const detail::Pcre2Ptr<pcre2_compile_context_8> context{
        pcre2_compile_context_create_8(nullptr)};
    if (!context) throw std::bad_alloc{};
    pcre2_set_newline_8(context.get(), PCRE2_NEWLINE_LF);
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(translated.data()), translated.size(),
                                PCRE2_UTF | PCRE2_UCP, &error, &offset, context.get()));
    if (!code_) throw FormatError{path, where + ": " + message_of(error)};
    // Without JIT support in the library this fails and matching falls back to the interpreter.
    pcre2_jit_compile_8(code_.get(), PCRE2_JIT_COMPLETE);
  }

  /// @brief The leftmost match that begins at `from` or later.
  /// @pre `text` is UTF-8 and `from` lies at a character.
  /// @throws Error naming the pattern's place if it needs more steps than any sane pattern does on
  /// a text this long, or memory runs out.
  [[nodiscard]] std::optional<TextMatch> find(std::string_view text, std::size_t from,
                                              RegexScratch& scratch) const {
    prepare(scratch, text.size());
    int rc = match(text, from, 0, scratch);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && !scratch.stack_) {
      scratch.stack_.reset(
          pcre2_jit_stack_create_8(std::size_t{1} << 15U, std::size_t{1} << 26U, nullptr));
      pcre2_jit_stack_assign_8(scratch.context_.get(), nullptr, scratch.stack_.get());
      rc = match(text, from, 0, scratch);
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) rc = match(text, from, PCRE2_NO_JIT, scratch);
    if (rc == PCRE2_ERROR_NOMATCH) return std::nullopt;
    if (rc < 0) throw Error{where_ + ": matching failed: " + message_of(rc)};
    const PCRE2_SIZE* span = pcre2_get_ovector_pointer_8(scratch.data_.get());
    return TextMatch{span[0], span[1]};
  }

  /// @brief Calls `use(TextMatch)` for successive matches. An empty match right behind the match
  /// before it does not count.
  template <typename Use>
  void for_each_match(std::string_view text, RegexScratch& scratch, Use&& use) const {
    std::optional<std::size_t> last_end;
    for (std::size_t at = 0; at <= text.size();) {
      const auto found = find(text, at, scratch);
      if (!found) return;
      if (found->begin == found->end && last_end == found->end) {
        at += at < text.size() ? utf8_step(text, at).length : 1;
        continue;
      }
      at = found->end;
      last_end = found->end;
      use(*found);
    }
  }

 private:
  static std::string message_of(int error) {
    PCRE2_UCHAR8 text[256] = {};
    pcre2_get_error_message_8(error, text, sizeof text);
    return reinterpret_cast<const char*>(text);
  }

  static void prepare(RegexScratch& scratch, std::size_t size) {
    if (!scratch.data_) {
      scratch.data_.reset(pcre2_match_data_create_8(1, nullptr));
      scratch.context_.reset(pcre2_match_context_create_8(nullptr));
      if (!scratch.data_ || !scratch.context_) throw std::bad_alloc{};
      pcre2_set_depth_limit_8(scratch.context_.get(), UINT32_MAX);
      pcre2_set_heap_limit_8(scratch.context_.get(), UINT32_MAX);
    }
    // Real patterns need a few steps a byte; a hostile one must end.
    const std::uint64_t steps = 10'000'000 + 1000 * static_cast<std::uint64_t>(size);
    const auto limit = static_cast<std::uint32_t>(std::min<std::uint64_t>(steps, UINT32_MAX));
    pcre2_set_match_limit_8(scratch.context_.get(), limit);
  }

  int match(std::string_view text, std::size_t from, std::uint32_t options,
            RegexScratch& scratch) const {
    return pcre2_match_8(code_.get(), reinterpret_cast<PCRE2_SPTR8>(text.data()), text.size(), from,
                         PCRE2_NO_UTF_CHECK | options, scratch.data_.get(), scratch.context_.get());
  }

  std::string where_;
  detail::Pcre2Ptr<pcre2_code_8> code_;
};

}  // namespace block_streamer::inline v1
