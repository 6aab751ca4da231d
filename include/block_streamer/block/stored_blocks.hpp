// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/weight_binding.hpp>
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// "layers.{}." in two, so that names can be taken apart.
struct BlockNames {
  std::string head, tail;

  explicit BlockNames(std::string_view pattern) {
    const std::size_t place = pattern.find("{}");
    expects(
        place != std::string_view::npos && pattern.find("{}", place + 2) == std::string_view::npos,
        "a pattern of block names has one {} where the number of the block is");
    head = pattern.substr(0, place);
    tail = pattern.substr(place + 2);
  }
  [[nodiscard]] std::string prefix(std::size_t block) const {
    return head + std::to_string(block) + tail;
  }
  /// The number in a name that begins like the pattern, as std::to_string writes it.
  [[nodiscard]] std::optional<std::uint64_t> block_of(std::string_view name) const {
    if (!name.starts_with(head)) return std::nullopt;
    std::uint64_t block = 0;
    const char* const begin = name.data() + head.size();
    const auto [end, error] = std::from_chars(begin, name.data() + name.size(), block);
    if (error != std::errc{} || (*begin == '0' && end != begin + 1)) return std::nullopt;
    name.remove_prefix(static_cast<std::size_t>(end - name.data()));
    return name.starts_with(tail) ? std::optional{block} : std::nullopt;
  }
};

/// Every tensor of the checkpoint that belongs to one of `count` blocks, by block.
[[nodiscard]] inline std::vector<BlockTensors> tensors_by_block(const Checkpoint& checkpoint,
                                                                const BlockNames& names,
                                                                std::size_t count) {
  std::vector<BlockTensors> blocks(count);
  for (std::size_t b = 0; b < count; ++b) blocks[b].prefix = names.prefix(b);
  for (const UnsupportedTensor& tensor : checkpoint.unsupported()) {
    if (names.block_of(tensor.name)) static_cast<void>(checkpoint.at(tensor.name));  // refuses it
  }
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    const auto block = names.block_of(tensor.spec.name);
    if (!block) continue;
    if (*block >= count) {
      throw BindingError{"the checkpoint has " + tensor.spec.name + ", the list only " +
                         std::to_string(count) + " blocks"};
    }
    BlockTensors& of_block = blocks[static_cast<std::size_t>(*block)];
    of_block.names.push_back(tensor.spec.name.substr(of_block.prefix.size()));
  }
  return blocks;
}

}  // namespace detail

/// @brief Where the tensors of a list of blocks lie in a checkpoint, by their names: for any tier
/// over its files. Blocks whose own tensors are on meta (@see to_meta) need no memory for them.
/// @param pattern  what the names of a block's tensors begin with, its number as {}: "layers.{}."
/// @throws BindingError listing every tensor of a block that is missing, unexpected, or has another
/// shape or type, or one of a block beyond the list; UnsupportedError for one of a type that is not
/// carried.
template <streamable_block Block>
[[nodiscard]] BlockMap stored_blocks(const Checkpoint& checkpoint, std::span<const Block> blocks,
                                     std::string_view pattern, std::uint32_t read_granularity = 1) {
  const auto tensors =
      detail::tensors_by_block(checkpoint, detail::BlockNames{pattern}, blocks.size());
  BlockMap map = make_block_map(checkpoint, tensors, read_granularity);
  for (std::size_t b = 0; b < blocks.size(); ++b)
    static_cast<void>(
        bind_weights(block_at(b), blocks[b].weight_specs(), map.blocks()[b].image.layout));
  return map;
}
template <streamable_block Block>
[[nodiscard]] BlockMap stored_blocks(const Checkpoint& checkpoint, const std::vector<Block>& blocks,
                                     std::string_view pattern, std::uint32_t read_granularity = 1) {
  return stored_blocks(checkpoint, std::span<const Block>{blocks}, pattern, read_granularity);
}

}  // namespace block_streamer::inline v1
