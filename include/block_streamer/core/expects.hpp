// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <source_location>
#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// @brief Checks a precondition at a public entry point; always on.
/// @throws ContractViolation naming `text` and the place of the call if `condition` is false.
/// **Cost.** One branch; the text is built only on failure.
inline void expects(bool condition, std::string_view text,
                    std::source_location where = std::source_location::current()) {
  if (condition) return;
  throw ContractViolation{std::string{text} + " [" + where.function_name() + "]"};
}

}  // namespace block_streamer::inline v1
