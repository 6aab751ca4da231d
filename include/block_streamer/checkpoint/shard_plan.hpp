// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/float_conversion.hpp>
#include <block_streamer/checkpoint/shard_folder.hpp>
#include <block_streamer/checkpoint/shard_manifest.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

/// How a checkpoint is packed.
struct ShardOptions {
  /// No file is larger, unless one block or one tensor outside blocks is.
  std::uint64_t shard_byte_count = std::uint64_t{4} << 30;
  /// What the model's floating weights become; nullopt: they stay as they are.
  std::optional<DType> dtype{};
};

/// One tensor of a packed file.
struct PackedTensor {
  std::string name;
  std::string dtype;  ///< in the packed file, as safetensors spells it
  Shape shape;
  FileRange source;             ///< in the checkpoint's files; empty for padding
  std::optional<DType> from{};  ///< set where the values are converted,
  std::optional<DType> to{};    ///< and into what
  ByteRange range;              ///< counted from the packed file's data
};

/// Tensors that are summed together: a block, or one tensor outside blocks.
struct PackedGroup {
  enum class Kind : std::uint8_t { block, resident, other };
  Kind kind = Kind::block;
  std::string name;  ///< of a block its prefix
  std::vector<PackedTensor> tensors;
  ByteRange range;  ///< from the first tensor to the end of the last, counted from the data
};

/// One file to be written.
struct PackedShard {
  std::string file_name;
  std::string header;  ///< the eight bytes of its length included; as long as packed_alignment asks
  std::vector<PackedGroup> groups;
  std::uint64_t byte_count = 0;  ///< of the whole file
};

namespace detail {

/// Gathers groups into shards and gives every tensor its place.
class ShardPlanner {
 public:
  ShardPlanner(const Checkpoint& checkpoint, const ShardOptions& options)
      : checkpoint_{checkpoint}, options_{options} {}

  /// @throws UnsupportedError if a tensor is in two groups.
  void add(PackedGroup::Kind kind, const std::string& name,
           std::span<const StoredTensor* const> tensors) {
    PackedGroup group{kind, name, {}, {}};
    for (const StoredTensor* tensor : tensors) {
      if (!used_.insert(tensor->spec.name).second) {
        throw UnsupportedError{checkpoint_.folder().string() + ": tensor '" + tensor->spec.name +
                               "' belongs to two blocks, which cannot be packed"};
      }
      const DType stored = tensor->spec.dtype;
      const bool convert = kind != PackedGroup::Kind::other && options_.dtype &&
                           *options_.dtype != stored && is_convertible_float(stored);
      const DType type = convert ? *options_.dtype : stored;
      PackedTensor packed{tensor->spec.name,
                          std::string{name_of(type)},
                          tensor->spec.shape,
                          {tensor->file, tensor->range},
                          {},
                          {},
                          {}};
      if (convert) packed.from = stored, packed.to = type;
      const auto byte_count = dense_byte_count(type, packed.shape);
      expects(byte_count.has_value(), "a converted tensor fits 64 bits");
      append(group, std::move(packed), *byte_count);
    }
    place(std::move(group));
  }
  void add_unsupported(const UnsupportedTensor& tensor) {
    PackedGroup group{PackedGroup::Kind::other, tensor.name, {}, {}};
    append(group,
           {tensor.name, tensor.dtype, tensor.shape, {tensor.file, tensor.range}, {}, {}, {}},
           tensor.range.byte_count);
    place(std::move(group));
  }
  [[nodiscard]] bool uses(const std::string& name) const { return used_.count(name) != 0; }

  [[nodiscard]] std::vector<PackedShard> finish() && {
    const std::string count = padded(shards_.size());
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      PackedShard& shard = shards_[i];
      shard.file_name = "model-" + padded(i + 1) + "-of-" + count + ".safetensors";
      shard.header = header_of(shard);
      shard.byte_count = shard.header.size() + data_byte_count(shard);
    }
    return std::move(shards_);
  }

 private:
  static std::string padded(std::size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  }
  /// The data ends aligned as well, so that the last block can be read like the others.
  static std::uint64_t data_byte_count(const PackedShard& shard) {
    return round_up(shard.groups.back().range.end(), packed_alignment);
  }

  /// The same places as in a slot; see lay_out().
  static void append(PackedGroup& group, PackedTensor tensor, std::uint64_t byte_count) {
    const std::uint64_t end = group.range.byte_count;
    const std::uint64_t begin = byte_count == 0 ? end : round_up(end, tensor_alignment);
    tensor.range = {begin, byte_count};
    group.range.byte_count = begin + byte_count;
    group.tensors.push_back(std::move(tensor));
  }

  void place(PackedGroup group) {
    std::uint64_t names = 0;
    for (const PackedTensor& tensor : group.tensors) names += longest_entry(tensor);
    const bool begun = !shards_.empty();
    std::uint64_t begin = begun ? data_byte_count(shards_.back()) : 0;
    const std::uint64_t header = round_up(header_bytes_ + names + 64, packed_alignment);
    const std::uint64_t size = header + begin + round_up(group.range.byte_count, packed_alignment);
    if (!begun || size > options_.shard_byte_count) {
      shards_.emplace_back();
      header_bytes_ = 0;
      begin = 0;
    }
    header_bytes_ += names;
    group.range.offset = begin;
    for (PackedTensor& tensor : group.tensors) tensor.range.offset += begin;
    shards_.back().groups.push_back(std::move(group));
  }
  /// At most so many bytes of header, with an entry of padding.
  static std::uint64_t longest_entry(const PackedTensor& tensor) {
    return nlohmann::json(tensor.name).dump().size() + tensor.dtype.size() +
           nlohmann::json(tensor.shape).dump().size() + 256;
  }

  static void append_entry(std::string& text, const std::string& name, const std::string& dtype,
                           const Shape& shape, ByteRange range) {
    text += "," + nlohmann::json(name).dump() + ":{\"dtype\":" + nlohmann::json(dtype).dump();
    text += ",\"shape\":" + nlohmann::json(shape).dump();
    text += ",\"data_offsets\":[" + std::to_string(range.offset) + "," +
            std::to_string(range.end()) + "]}";
  }
  /// Files of the format have no holes: tensors of bytes fill what alignment leaves.
  void append_padding(std::string& text, std::uint64_t begin, std::uint64_t end) {
    if (begin == end) return;
    const std::string name{shard_padding_prefix};
    append_entry(text, name + std::to_string(padding_count_++), "U8", {end - begin},
                 {begin, end - begin});
  }
  [[nodiscard]] std::string header_of(const PackedShard& shard) {
    std::string text = R"({"__metadata__":{"format":"pt"})";
    std::uint64_t end = 0;
    for (const PackedGroup& group : shard.groups) {
      for (const PackedTensor& tensor : group.tensors) {
        append_padding(text, end, tensor.range.offset);
        append_entry(text, tensor.name, tensor.dtype, tensor.shape, tensor.range);
        end = tensor.range.end();
      }
    }
    append_padding(text, end, data_byte_count(shard));
    text += "}";
    text.resize(round_up(8 + text.size(), packed_alignment) - 8, ' ');
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) {
      length[i] = static_cast<char>(text.size() >> (8 * i) & 0xffU);
    }
    return length + text;
  }

  const Checkpoint& checkpoint_;
  const ShardOptions& options_;
  std::vector<PackedShard> shards_;
  std::set<std::string> used_;
  std::uint64_t header_bytes_ = 0;  ///< of the last shard, at most
  std::uint64_t padding_count_ = 0;
};

}  // namespace detail

/// @brief Decides where every tensor of a checkpoint goes: blocks in their order, then resident
/// tensors, then all others, so that nothing is lost. A block is contiguous in one file, laid out
/// as in a slot, and begins at a multiple of 4096. Files are safetensors files.
/// @param blocks  whose names are as in the checkpoint. @param resident  full names.
/// @throws BindingError, UnsupportedError as Checkpoint::at(); UnsupportedError for a tensor that
/// is in two blocks. @pre the checkpoint outlives nothing of the result.
/// **Cost.** O(n log n) in the number of tensors; no weight is read.
[[nodiscard]] inline std::vector<PackedShard> plan_shards(const Checkpoint& checkpoint,
                                                          std::span<const BlockTensors> blocks,
                                                          std::span<const std::string> resident,
                                                          const ShardOptions& options = {}) {
  expects(!options.dtype || is_convertible_float(*options.dtype),
          "packed weights are F16, BF16, F32 or F64");
  detail::ShardPlanner planner{checkpoint, options};
  using Kind = PackedGroup::Kind;
  for (const BlockTensors& block : blocks) {
    planner.add(Kind::block, block.prefix, detail::tensors_in_file_order(checkpoint, block));
  }
  const auto add_one = [&](Kind kind, const StoredTensor& tensor) {
    planner.add(kind, tensor.spec.name, std::vector{&tensor});
  };
  for (const std::string& name : resident) add_one(Kind::resident, checkpoint.at(name));
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (!planner.uses(tensor.spec.name)) add_one(Kind::other, tensor);
  }
  for (const UnsupportedTensor& tensor : checkpoint.unsupported()) planner.add_unsupported(tensor);
  return std::move(planner).finish();
}

}  // namespace block_streamer::inline v1
