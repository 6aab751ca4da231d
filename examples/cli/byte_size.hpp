// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace block_streamer_cli {

/// @brief Reads a size as users write it: "4096", "512MiB", "1.5 GiB". Units are B, KiB, MiB, GiB,
/// TiB (powers of 1024) and KB, MB, GB, TB (powers of 1000), in any case; none means bytes. What is
/// not a whole number of bytes is rounded down, but a fraction needs a unit larger than a byte.
/// @param byte_count  set if the text is a size; below 2^63.
/// @returns what is wrong with the text; empty: nothing.
[[nodiscard]] std::string parse_byte_size(std::string_view text, std::uint64_t& byte_count);

}  // namespace block_streamer_cli
