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
/// own type, then by name. @throws ContractViolation for a name twice or a size that does not fit.
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

[[nodiscard]] inline std::string safetensors_header_text(
    std::span<const TensorBytes* const> tensors,
    const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t begin = 0;
  for (const TensorBytes* tensor : tensors) {
    const std::uint64_t end = begin + tensor->bytes.size();
    expects(!header.contains(tensor->spec.name),
            "tensor '" + tensor->spec.name + "' is to be written twice");
    header[tensor->spec.name] = {{"dtype", name_of(tensor->spec.dtype)},
                                 {"shape", tensor->spec.shape},
                                 {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
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
