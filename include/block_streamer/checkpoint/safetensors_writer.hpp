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
#include <numeric>
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

/// @throws ContractViolation for a tensor whose size 64 bits do not hold.
[[nodiscard]] inline std::uint64_t written_byte_count(const TensorSpec& spec) {
  const auto byte_count = dense_byte_count(spec.dtype, spec.shape);
  expects(byte_count.has_value(), "tensor '" + spec.name + "': its size fits 64 bits");
  return *byte_count;
}

/// The order of the format's reference writer: wide types first, so every tensor is aligned to its
/// own type, then by name. @returns positions. @throws ContractViolation for a name given twice.
[[nodiscard]] inline std::vector<std::size_t> writing_order(std::span<const TensorSpec> specs) {
  std::vector<std::size_t> order(specs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto name_of_tensor = [&](std::size_t i) -> std::string_view { return specs[i].name; };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return name_of_tensor(a) < name_of_tensor(b); });
  const auto twice = std::adjacent_find(
      order.begin(), order.end(),
      [&](std::size_t a, std::size_t b) { return name_of_tensor(a) == name_of_tensor(b); });
  expects(twice == order.end(), "a tensor is to be written twice");
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return specs[a].dtype > specs[b].dtype; });
  return order;
}

/// Written piece by piece: a document tree would search all its keys at each insertion.
[[nodiscard]] inline std::string safetensors_header_text(
    std::span<const TensorSpec> specs, const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump();
  std::uint64_t begin = 0;
  for (const TensorSpec& spec : specs) {
    expects(spec.name != "__metadata__", "no tensor is called '__metadata__'");
    const auto end = checked_add(begin, written_byte_count(spec));
    expects(end.has_value(), "the file's size fits 64 bits");
    if (text.size() > 1) text += ",";
    text += nlohmann::json(spec.name).dump();
    text += ":{\"dtype\":\"" + std::string{name_of(spec.dtype)} + "\"";
    text += ",\"shape\":" + nlohmann::json(spec.shape).dump();
    text += ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(*end) + "]}";
    begin = *end;
  }
  text += "}";
  text.resize(round_up(text.size(), 8), ' ');
  return text;
}

}  // namespace detail

/// @brief A safetensors file whose data comes piece by piece, for what does not fit into memory.
/// The data begins at a multiple of 8. Until commit() nothing changes at the file's place.
class SafetensorsStream {
 public:
  /// @throws StorageError if no file can be made there. @pre names distinct and valid UTF-8.
  SafetensorsStream(const std::filesystem::path& path, std::span<const TensorSpec> specs,
                    const std::map<std::string, std::string>& metadata = {})
      : order_{detail::writing_order(specs)}, file_{path} {
    std::vector<TensorSpec> sorted;
    for (const std::size_t i : order_) {
      sorted.push_back(specs[i]);
      missing_ += detail::written_byte_count(specs[i]);
    }
    const std::string header = detail::safetensors_header_text(sorted, metadata);
    std::array<std::byte, 8> length{};
    for (std::size_t i = 0; i < length.size(); ++i) {
      length[i] = static_cast<std::byte>(header.size() >> (8 * i) & 0xff);
    }
    file_.append(length);
    file_.append(std::as_bytes(std::span{header}));
  }

  /// @brief The order in which the tensors' bytes are to be appended: positions in the given list.
  [[nodiscard]] const std::vector<std::size_t>& order() const noexcept { return order_; }
  /// @throws StorageError if it cannot be written, e.g. because the disk is full.
  void append(std::span<const std::byte> bytes) {
    expects(bytes.size() <= missing_, "more bytes than the tensors have");
    file_.append(bytes);
    missing_ -= bytes.size();
  }
  /// @brief Makes it durable and moves it to its place. @pre all bytes are appended.
  void commit() {
    expects(missing_ == 0, "bytes of tensors are missing");
    file_.commit();
  }

 private:
  std::vector<std::size_t> order_;
  ReplacingFile file_;
  std::uint64_t missing_ = 0;
};

/// @brief Writes a safetensors file: the same tensors and metadata give the same bytes, whatever
/// their order. The data begins at a multiple of 8. `path` is replaced as a whole or not at all.
/// @throws StorageError naming the path if it cannot be written, e.g. because the disk is full.
/// @pre names distinct and valid UTF-8; sizes match shapes.
inline void write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorBytes> tensors,
                              const std::map<std::string, std::string>& metadata = {}) {
  std::vector<TensorSpec> specs;
  for (const TensorBytes& tensor : tensors) {
    expects(dense_byte_count(tensor.spec.dtype, tensor.spec.shape) == tensor.bytes.size(),
            "tensor '" + tensor.spec.name + "': bytes and shape differ in size");
    specs.push_back(tensor.spec);
  }
  SafetensorsStream file{path, specs, metadata};
  for (const std::size_t i : file.order()) file.append(tensors[i].bytes);
  file.commit();
}

}  // namespace block_streamer::inline v1
