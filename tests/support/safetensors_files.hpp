// SPDX-License-Identifier: Apache-2.0
// Safetensors files made by hand: legal, odd-but-legal and malformed ones, and small checkpoints
// whose every byte depends on its tensor and offset. Independent of the library's own writer.
#pragma once

#include <support/fresh_folder.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace support {

/// A fresh folder, removed with its contents at the end.
class TempFolder {
 public:
  TempFolder() : path_{fresh_folder("bs-test-")} {}
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::filesystem::path operator/(std::string_view name) const {
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::ofstream out{path, std::ios::binary | std::ios::trunc};
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  if (!out) throw std::runtime_error{"cannot write " + path.string()};
}

[[nodiscard]] inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream in{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{in}, {}};
}

/// The byte at `offset` of the tensor `name`: differs between neighbours, pages and tensors.
[[nodiscard]] inline std::byte pattern_byte(std::string_view name, std::uint64_t offset) {
  std::uint64_t x = 0xcbf29ce484222325ULL;
  for (const char c : name) x = (x ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  x ^= offset * 0x9e3779b97f4a7c15ULL;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9ULL;
  return static_cast<std::byte>((x >> 32) & 0xff);
}

[[nodiscard]] inline std::string pattern_bytes(std::string_view name, std::uint64_t byte_count) {
  std::string bytes(byte_count, '\0');
  for (std::uint64_t i = 0; i < byte_count; ++i) {
    bytes[i] = static_cast<char>(pattern_byte(name, i));
  }
  return bytes;
}

/// One tensor as a header lists it. `data` empty and `byte_count` > 0: filled with pattern_bytes.
struct RawTensor {
  std::string name;
  std::string dtype = "F32";
  std::vector<std::uint64_t> shape;
  std::uint64_t byte_count = 0;
  std::string data = {};
};

[[nodiscard]] inline std::uint64_t dtype_size(std::string_view dtype) {
  if (dtype.find("64") != std::string_view::npos) return 8;
  if (dtype.find("32") != std::string_view::npos) return 4;
  if (dtype.find("16") != std::string_view::npos) return 2;
  return 1;
}

/// A tensor of that dtype and shape, filled with its pattern.
[[nodiscard]] inline RawTensor raw_tensor(std::string name, std::string dtype,
                                          std::vector<std::uint64_t> shape) {
  std::uint64_t byte_count = dtype_size(dtype);
  for (const std::uint64_t size : shape) byte_count *= size;
  return {std::move(name), std::move(dtype), std::move(shape), byte_count, {}};
}

/// 8-byte little-endian length, the header as it is, the data as it is: nothing is checked.
[[nodiscard]] inline std::string raw_file(std::string_view header, std::string_view data,
                                          std::uint64_t claimed_header_size) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) {
    file[static_cast<std::size_t>(i)] = static_cast<char>((claimed_header_size >> (8 * i)) & 0xff);
  }
  return file.append(header).append(data);
}
[[nodiscard]] inline std::string raw_file(std::string_view header, std::string_view data) {
  return raw_file(header, data, header.size());
}

[[nodiscard]] inline std::string shape_json(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  }
  return text + "]";
}

/// "name":{"dtype":…,"shape":…,"data_offsets":[begin,end]}
[[nodiscard]] inline std::string entry_json(std::string_view name, std::string_view dtype,
                                            std::string_view shape, std::string_view begin,
                                            std::string_view end) {
  return "\"" + std::string{name} + "\":{\"dtype\":\"" + std::string{dtype} +
         "\",\"shape\":" + std::string{shape} + ",\"data_offsets\":[" + std::string{begin} + "," +
         std::string{end} + "]}";
}

struct FileOptions {
  std::string metadata_json = {};      ///< value of "__metadata__"; empty: no such key
  std::uint64_t header_alignment = 8;  ///< the header is padded with spaces to this
  std::uint64_t header_remainder = 0;  ///< 8 + header length ≡ this (mod header_alignment)
};

/// A legal file with the tensors' data one after another in the order given.
[[nodiscard]] inline std::string safetensors_bytes(std::span<const RawTensor> tensors,
                                                   const FileOptions& options = {}) {
  std::string header = "{";
  std::string data;
  if (!options.metadata_json.empty()) header += "\"__metadata__\":" + options.metadata_json;
  for (const RawTensor& tensor : tensors) {
    const std::uint64_t begin = data.size();
    data += tensor.data.empty() ? pattern_bytes(tensor.name, tensor.byte_count) : tensor.data;
    if (header.size() > 1) header += ",";
    header += entry_json(tensor.name, tensor.dtype, shape_json(tensor.shape), std::to_string(begin),
                         std::to_string(data.size()));
  }
  header += "}";
  while ((8 + header.size()) % options.header_alignment != options.header_remainder) header += " ";
  return raw_file(header, data);
}

inline void write_safetensors_file(const std::filesystem::path& path,
                                   std::span<const RawTensor> tensors,
                                   const FileOptions& options = {}) {
  write_text(path, safetensors_bytes(tensors, options));
}

[[nodiscard]] inline std::string shard_name(std::size_t shard, std::size_t count) {
  const auto padded = [](std::size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(5 - digits.size(), '0') + digits;
  };
  return "model-" + padded(shard + 1) + "-of-" + padded(count) + ".safetensors";
}

/// Numbered shards and model.safetensors.index.json; or model.safetensors alone for one shard.
inline void write_shards(const std::filesystem::path& folder,
                         std::span<const std::vector<RawTensor>> shards,
                         const FileOptions& options = {}) {
  if (shards.size() == 1) {
    write_safetensors_file(folder / "model.safetensors", shards[0], options);
    return;
  }
  std::string map;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    write_safetensors_file(folder / name, shards[i], options);
    for (const RawTensor& tensor : shards[i]) {
      map += (map.empty() ? "" : ",") + ("\"" + tensor.name) + "\":\"" + name + "\"";
    }
  }
  write_text(folder / "model.safetensors.index.json",
             "{\"metadata\":{\"total_size\":1},\"weight_map\":{" + map + "}}");
}

/// Sizes of a small decoder; the defaults are odd on purpose (head_dim ≠ hidden/heads).
struct TinyModel {
  std::string model_type = "llama";
  std::uint64_t hidden = 12;
  std::uint64_t intermediate = 20;
  std::uint64_t layers = 3;
  std::uint64_t heads = 4;
  std::uint64_t kv_heads = 2;
  std::uint64_t head_dim = 6;
  std::uint64_t vocabulary = 33;
  std::string dtype = "BF16";
  bool tied = true;
  bool attention_bias = false;
};

/// The tensors of decoder layer `layer` with their full names, in the order files list them.
[[nodiscard]] inline std::vector<RawTensor> layer_tensors(const TinyModel& m, std::uint64_t layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::uint64_t q = m.heads * m.head_dim;
  const std::uint64_t kv = m.kv_heads * m.head_dim;
  std::vector<RawTensor> tensors;
  const auto add = [&](std::string_view name, std::vector<std::uint64_t> shape) {
    tensors.push_back(raw_tensor(prefix + std::string{name}, m.dtype, std::move(shape)));
  };
  add("input_layernorm.weight", {m.hidden});
  add("mlp.down_proj.weight", {m.hidden, m.intermediate});
  add("mlp.gate_proj.weight", {m.intermediate, m.hidden});
  add("mlp.up_proj.weight", {m.intermediate, m.hidden});
  add("post_attention_layernorm.weight", {m.hidden});
  for (const auto& [name, rows] : {std::pair{"q", q}, {"k", kv}, {"v", kv}}) {
    const std::string base = std::string{"self_attn."} + name + "_proj.";
    add(base + "weight", {rows, m.hidden});
    if (m.attention_bias) add(base + "bias", {rows});
  }
  add("self_attn.o_proj.weight", {m.hidden, q});
  if (m.attention_bias) add("self_attn.o_proj.bias", {m.hidden});
  if (m.model_type == "qwen3") {
    add("self_attn.q_norm.weight", {m.head_dim});
    add("self_attn.k_norm.weight", {m.head_dim});
  }
  return tensors;
}

/// All tensors of the model: embedding, layers, norm, and the head unless tied.
[[nodiscard]] inline std::vector<RawTensor> model_tensors(const TinyModel& m) {
  std::vector<RawTensor> tensors;
  if (!m.tied) tensors.push_back(raw_tensor("lm_head.weight", m.dtype, {m.vocabulary, m.hidden}));
  tensors.push_back(raw_tensor("model.embed_tokens.weight", m.dtype, {m.vocabulary, m.hidden}));
  for (std::uint64_t layer = 0; layer < m.layers; ++layer) {
    for (RawTensor& tensor : layer_tensors(m, layer)) tensors.push_back(std::move(tensor));
  }
  tensors.push_back(raw_tensor("model.norm.weight", m.dtype, {m.hidden}));
  return tensors;
}

/// config.json of the model; `extra` is appended inside the object, e.g. ",\"a\":1".
[[nodiscard]] inline std::string config_json(const TinyModel& m, std::string_view extra = {}) {
  const auto number = [](std::string_view key, std::uint64_t value) {
    return ",\"" + std::string{key} + "\":" + std::to_string(value);
  };
  return "{\"model_type\":\"" + m.model_type + "\"" + number("hidden_size", m.hidden) +
         number("intermediate_size", m.intermediate) + number("num_hidden_layers", m.layers) +
         number("num_attention_heads", m.heads) + number("num_key_value_heads", m.kv_heads) +
         number("head_dim", m.head_dim) + number("vocab_size", m.vocabulary) +
         number("max_position_embeddings", 128) +
         ",\"rms_norm_eps\":1e-05,\"rope_theta\":10000.0,\"hidden_act\":\"silu\"" +
         ",\"tie_word_embeddings\":" + (m.tied ? "true" : "false") +
         ",\"attention_bias\":" + (m.attention_bias ? "true" : "false") +
         ",\"torch_dtype\":\"bfloat16\"" + std::string{extra} + "}";
}

/// A complete model folder (config.json and weights cut into `shard_count` files of about equal
/// tensor counts, so blocks straddle shards).
inline void write_tiny_model(const std::filesystem::path& folder, const TinyModel& model = {},
                             std::size_t shard_count = 1, const FileOptions& options = {}) {
  std::filesystem::create_directories(folder);
  write_text(folder / "config.json", config_json(model));
  const std::vector<RawTensor> tensors = model_tensors(model);
  std::vector<std::vector<RawTensor>> shards(shard_count);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    shards[i * shard_count / tensors.size()].push_back(tensors[i]);
  }
  write_shards(folder, shards, options);
}

}  // namespace support
