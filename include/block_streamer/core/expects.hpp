// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// @brief Where a function was called; std::source_location, which clang 14 lacks, as a default
/// argument.
struct CallSite {
  const char* function = "";
  [[nodiscard]] static constexpr CallSite current(
      const char* function = __builtin_FUNCTION()) noexcept {
    return {function};
  }
};

/// @brief Checks a precondition at a public entry point; always on.
/// @throws ContractViolation naming `text` and the place of the call if `condition` is false.
/// **Cost.** One branch; the text is built only on failure.
inline void expects(bool condition, std::string_view text, CallSite where = CallSite::current()) {
  if (condition) return;
  throw ContractViolation{std::string{text} + " [" + where.function + "]"};
}

}  // namespace block_streamer::inline v1
