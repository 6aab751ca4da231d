// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/ids.hpp>

#include <string>
#include <string_view>

namespace block_streamer::inline v1 {

/// @brief Where the bytes of a read come from, for messages: where it begins, and where it ends if
/// that is in another file. A block may straddle files, and a read that failed does not say in
/// which of them. @param storage  a locating_tier, or a reader with the same `locate`.
template <class Located>
[[nodiscard]] std::string read_place(const Located& storage, BlockId block, ByteRange image) {
  const auto file_of = [](std::string_view place) {
    return place.substr(0, place.rfind(", offset "));
  };
  const std::string first = storage.locate(block, image.offset);
  if (image.byte_count < 2) return first;
  const std::string last = storage.locate(block, image.end() - 1);
  return file_of(first) == file_of(last) ? first : first + " to " + last;
}

}  // namespace block_streamer::inline v1
