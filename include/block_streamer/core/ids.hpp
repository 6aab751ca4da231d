// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

namespace block_streamer::inline v1 {

/// Position of a block in the model's ordered list, counted from 0.
enum class BlockId : std::uint32_t {};

/// @brief The number behind a block id, as a container index.
[[nodiscard]] constexpr std::size_t index_of(BlockId block) noexcept {
  return static_cast<std::size_t>(block);
}

/// @brief The id of the `index`-th block.
[[nodiscard]] constexpr BlockId block_at(std::size_t index) noexcept {
  return static_cast<BlockId>(static_cast<std::uint32_t>(index));
}

/// The unit of residency. A block is one part (part 0, always needed) until it is split.
struct PartId {
  BlockId block{};
  std::uint32_t part = 0;
  friend auto operator<=>(const PartId&, const PartId&) = default;
};

/// @brief How messages name a part: "block 7", or "block 7 part 2" for any but the first.
[[nodiscard]] inline std::string to_string(PartId id) {
  std::string text = "block " + std::to_string(index_of(id.block));
  if (id.part != 0) text += " part " + std::to_string(id.part);
  return text;
}

}  // namespace block_streamer::inline v1
