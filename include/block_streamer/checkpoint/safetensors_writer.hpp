// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/tensor_spec.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

/// A tensor to be written: its bytes are dense and row-major, owned by the caller.
struct TensorBytes {
  TensorSpec spec;
  std::span<const std::byte> bytes;
};

namespace detail {

/// The order of the format's reference writer: wide types first, so every tensor is aligned to its
/// own type, then by name. @throws ContractViolation for a size that does not fit.
[[nodiscard]] inline std::vector<const TensorBytes*> writing_order(
    std::span<const TensorBytes> tensors) {
  std::vector<const TensorBytes*> order;
  for (const TensorBytes& tensor : tensors) {
    expects(dense_byte_count(tensor.spec.dtype, tensor.spec.shape) == tensor.bytes.size(),
            "tensor '" + tensor.spec.name + "': bytes and shape differ in size");
    expects(tensor.spec.name != "__metadata__", "no tensor is called '__metadata__'");
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const TensorBytes* a, const TensorBytes* b) {
    return std::pair{b->spec.dtype, std::string_view{a->spec.name}} <
           std::pair{a->spec.dtype, std::string_view{b->spec.name}};
  });
  return order;
}

/// @throws ContractViolation naming a tensor that is given twice.
inline void expect_distinct_names(std::span<const TensorBytes> tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorBytes& tensor : tensors) names.push_back(tensor.spec.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  expects(twice == names.end(), "a tensor is to be written twice");
}

/// Written piece by piece: a document tree would search all its keys at each insertion.
[[nodiscard]] inline std::string safetensors_header_text(
    std::span<const TensorBytes* const> tensors,
    const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump();
  std::uint64_t begin = 0;
  for (const TensorBytes* tensor : tensors) {
    const std::uint64_t end = begin + tensor->bytes.size();
    if (text.size() > 1) text += ",";
    text += nlohmann::json(tensor->spec.name).dump();
    text += ":{\"dtype\":\"" + std::string{name_of(tensor->spec.dtype)} + "\"";
    text += ",\"shape\":" + nlohmann::json(tensor->spec.shape).dump();
    text += ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
    begin = end;
  }
  text += "}";
  text.resize(round_up(text.size(), 8), ' ');
  return text;
}

}  // namespace detail

/// @brief Writes a safetensors file: the same tensors and metadata give the same bytes, whatever
/// their order. The data begins at a multiple of 8. `path` is replaced as a whole or not at all.
/// @throws StorageError naming the path if it cannot be written, e.g. because the disk is full.
/// @pre names distinct and valid UTF-8; sizes match shapes.
inline void write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorBytes> tensors,
                              const std::map<std::string, std::string>& metadata = {}) {
  detail::expect_distinct_names(tensors);
  const std::vector<const TensorBytes*> order = detail::writing_order(tensors);
  const std::string header = detail::safetensors_header_text(order, metadata);
  std::array<std::byte, 8> length{};
  for (std::size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<std::byte>(header.size() >> (8 * i) & 0xff);
  }
  ReplacingFile file{path};
  file.append(length);
  file.append(std::as_bytes(std::span{header}));
  for (const TensorBytes* tensor : order) file.append(tensor->bytes);
  file.commit();
}

}  // namespace block_streamer::inline v1
