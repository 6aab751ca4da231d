// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <array>
#include <charconv>
#include <string>

namespace block_streamer::inline v1 {

/// @brief The shortest decimal text that is read back as the same number, in any locale.
template <class Number>
[[nodiscard]] std::string number_text(Number value) {
  std::array<char, 40> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

}  // namespace block_streamer::inline v1
