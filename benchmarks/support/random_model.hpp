// SPDX-License-Identifier: Apache-2.0
// A decoder with random bf16 weights, without a head: in memory, or as safetensors files.
#pragma once

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/storage/ram_storage.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace block_streamer_benchmarks {

namespace bs = block_streamer;

/// @param shape  "qwen3-8b", "qwen3-1.7b", "qwen3-0.6b", "tiny"; @param layers  0: as the shape
/// has.
[[nodiscard]] inline bs::ModelConfig model_of(const std::string& shape, std::size_t layers) {
  bs::ModelConfig config;
  config.path = shape;
  config.model_type = "qwen3";
  config.head_dim = 128;
  config.rms_norm_eps = 1e-6;
  config.rope.type = "default";
  config.rope.theta = 1e6;
  config.max_position = 40960;
  const auto set = [&config](std::uint64_t hidden, std::uint64_t inner, std::uint64_t heads,
                             std::uint64_t kv_heads, std::uint64_t layer_count) {
    config.hidden_size = hidden;
    config.intermediate_size = inner;
    config.head_count = heads;
    config.kv_head_count = kv_heads;
    config.layer_count = layer_count;
  };
  if (shape == "qwen3-8b") {
    set(4096, 12288, 32, 8, 36);
  } else if (shape == "qwen3-1.7b") {
    set(2048, 6144, 16, 8, 28);
  } else if (shape == "qwen3-0.6b") {
    set(1024, 3072, 16, 8, 28);
  } else if (shape == "tiny") {
    config.head_dim = 32;
    set(128, 384, 4, 2, 6);
  } else {
    throw std::invalid_argument{"unknown shape " + shape +
                                " (qwen3-8b, qwen3-1.7b, qwen3-0.6b, tiny)"};
  }
  if (layers != 0) config.layer_count = layers;
  return config;
}

/// @brief How one block lies in a slot: tensors in the order of their use, at multiples of 256.
[[nodiscard]] inline bs::BlockLayout layout_of(const bs::ModelConfig& config) {
  bs::BlockLayout layout;
  std::uint64_t end = 0;
  for (const bs::ExpectedTensor& tensor : bs::decoder_block_tensors(config)) {
    const std::uint64_t begin = bs::round_up(end, bs::tensor_alignment);
    const std::uint64_t byte_count = bs::dense_byte_count(bs::DType::bf16, tensor.shape).value();
    layout.tensors.push_back({{tensor.name, bs::DType::bf16, tensor.shape}, 0, begin, byte_count});
    end = begin + byte_count;
  }
  layout.slot_byte_count = {end};
  return layout;
}

/// @brief Random bf16 numbers of magnitudes 2⁻¹¹ … 2⁻⁷: a large pool, copied from many places.
class RandomNumbers {
 public:
  RandomNumbers() : pool_(pool_word_count) {
    std::uint64_t state = 0x9e3779b97f4a7c15;
    for (std::uint64_t& word : pool_) {
      state += 0x9e3779b97f4a7c15;
      std::uint64_t bits = state;
      bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
      bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
      bits ^= bits >> 31;
      // Of each 16 bits: sign, mantissa and two bits of the exponent are random.
      word = (bits & 0x81ff81ff81ff81ff) | 0x3a003a003a003a00;
    }
  }
  /// @brief Fills `out`; another `place` gives other numbers.
  void fill(std::span<std::byte> out, std::uint64_t place) const {
    std::span<const std::byte> pool = std::as_bytes(std::span{pool_});
    std::size_t at = place * 7919 * 64 % pool.size();
    while (!out.empty()) {
      const std::size_t count = std::min(out.size(), pool.size() - at);
      std::memcpy(out.data(), pool.data() + at, count);
      out = out.subspan(count);
      at = 0;
    }
  }

 private:
  static constexpr std::size_t pool_word_count = (std::size_t{8} << 20) + 1009;
  std::vector<std::uint64_t> pool_;
};

inline void fill_ones(std::span<std::byte> out) {
  const std::uint16_t one = 0x3f80;  // 1.0 in bf16
  for (std::size_t i = 0; i + 2 <= out.size(); i += 2) std::memcpy(out.data() + i, &one, 2);
}

/// @brief The blocks in memory, filled by several threads: linear maps random, norms one.
[[nodiscard]] inline bs::RamStorage random_blocks(const bs::ModelConfig& config) {
  const bs::BlockLayout layout = layout_of(config);
  bs::RamStorage storage{std::vector<bs::BlockLayout>(config.layer_count, layout)};
  const RandomNumbers numbers;
  const std::size_t threads = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
  std::vector<std::jthread> workers;
  for (std::size_t t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      for (std::size_t b = t; b < storage.block_count(); b += threads) {
        for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
          const auto out = storage.writable_bytes(bs::block_at(b), layout.tensors[i]);
          layout.tensors[i].spec.shape.size() == 1 ? fill_ones(out) : numbers.fill(out, b * 64 + i);
        }
      }
    });
  }
  workers.clear();
  return storage;
}

/// @brief Writes the blocks as a checkpoint is published: shards and their index.
inline void write_checkpoint(const std::filesystem::path& folder, bs::RamStorage& blocks) {
  constexpr std::size_t blocks_a_shard = 9;  // 3.2 GiB at the 8B shape
  std::filesystem::create_directories(folder);
  const std::size_t shards = (blocks.block_count() + blocks_a_shard - 1) / blocks_a_shard;
  nlohmann::json index;
  std::uint64_t total = 0;
  for (std::size_t s = 0; s < shards; ++s) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", s + 1, shards);
    std::vector<bs::TensorBytes> tensors;
    const std::size_t end = std::min(blocks.block_count(), (s + 1) * blocks_a_shard);
    for (std::size_t b = s * blocks_a_shard; b < end; ++b) {
      for (const bs::TensorPlacement& tensor : blocks.image(bs::block_at(b)).layout.tensors) {
        bs::TensorSpec spec = tensor.spec;
        spec.name = bs::decoder_block_prefix(b) + spec.name;
        index["weight_map"][spec.name] = name;
        total += tensor.byte_count;
        tensors.push_back({std::move(spec), blocks.writable_bytes(bs::block_at(b), tensor)});
      }
    }
    bs::write_safetensors(folder / name, tensors, {{"format", "pt"}});
  }
  index["metadata"]["total_size"] = total;
  std::ofstream{folder / "model.safetensors.index.json"} << index.dump(2) << '\n';
}

/// @brief The blocks of a checkpoint that write_checkpoint() made, read into memory.
[[nodiscard]] inline bs::RamStorage load_checkpoint(const std::filesystem::path& folder,
                                                    const bs::ModelConfig& config) {
  const bs::Checkpoint checkpoint = bs::Checkpoint::open(folder);
  std::vector<bs::BlockTensors> blocks;
  for (std::size_t b = 0; b < config.layer_count; ++b) {
    bs::BlockTensors& block = blocks.emplace_back();
    block.prefix = bs::decoder_block_prefix(b);
    for (const auto& tensor : bs::decoder_block_tensors(config)) block.names.push_back(tensor.name);
  }
  return bs::RamStorage::load(bs::make_block_map(checkpoint, blocks));
}

/// @brief A tier that somebody else owns, so that streamers can take turns at it.
class BorrowedRam {
 public:
  explicit BorrowedRam(bs::RamStorage& storage) noexcept : storage_{&storage} {}
  [[nodiscard]] std::size_t block_count() const noexcept { return storage_->block_count(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId block) const noexcept {
    return storage_->image(block);
  }
  void async_read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    storage_->async_read(block, range, out, std::move(done));
  }
  [[nodiscard]] std::span<const std::byte> bytes(bs::BlockId block) const noexcept {
    return storage_->bytes(block);
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept {
    return storage_->regions();
  }

 private:
  bs::RamStorage* storage_;
};
static_assert(bs::addressable_tier<BorrowedRam>);

}  // namespace block_streamer_benchmarks
